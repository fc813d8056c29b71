#include "autograd/norm.h"
