#include "autograd/gather.h"
