#include "autograd/attention.h"
