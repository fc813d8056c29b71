#include "autograd/linear.h"
