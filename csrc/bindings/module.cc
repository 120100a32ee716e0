#include "registers.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "C++ kernels of torchrec_tpu: host preprocessing and CPU execution.";
  trtpu::RegisterThreadPool(m);
  trtpu::RegisterPreprocess(m);
  trtpu::RegisterRowOps(m);
  trtpu::RegisterRouting(m);
}
