#include "kernels/detection_loss.h"
