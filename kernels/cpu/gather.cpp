#include "kernels/gather.h"
