#include "kernels/layer_norm.h"
