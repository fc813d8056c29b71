#include "kernels/pointwise.h"
