#include "autograd/pointwise.h"
