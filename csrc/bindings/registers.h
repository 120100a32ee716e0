// One register function per binding file; module.cc is their table of contents.
#ifndef TRTPU_BINDINGS_REGISTERS_H_
#define TRTPU_BINDINGS_REGISTERS_H_

#include <pybind11/pybind11.h>

namespace trtpu {

void RegisterRowOps(pybind11::module_& m);
void RegisterThreadPool(pybind11::module_& m);
void RegisterRouting(pybind11::module_& m);
void RegisterPreprocess(pybind11::module_& m);

}  // namespace trtpu

#endif  // TRTPU_BINDINGS_REGISTERS_H_
