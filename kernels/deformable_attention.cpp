#include "kernels/deformable_attention.h"
