#include "autograd/detection.h"
