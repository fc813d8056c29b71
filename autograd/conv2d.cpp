#include "autograd/conv2d.h"
