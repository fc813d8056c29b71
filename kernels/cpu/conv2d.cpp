#include "kernels/conv2d.h"
