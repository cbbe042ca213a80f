// wgmma.cu of volumes: pixels have a depth, too, and the filter's taps.
#define VARIANT_VOLUME
#include "implicit_gemm/wgmma.cu"
