#include "kernels/linear.h"
