#include "autograd/spatial.h"
