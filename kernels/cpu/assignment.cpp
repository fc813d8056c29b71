#include "kernels/assignment.h"
