#include "kernels/batch_norm.h"
