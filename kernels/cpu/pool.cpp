#include "kernels/pool.h"
