#include "kernels/topk.h"
