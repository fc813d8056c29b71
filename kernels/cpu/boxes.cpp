#include "kernels/boxes.h"
