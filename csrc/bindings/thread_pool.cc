#include "trtpu/thread_pool.h"

#include "registers.h"

namespace py = pybind11;

namespace trtpu {

void RegisterThreadPool(py::module_& m) {
  py::class_<ThreadPool>(m, "ThreadPool", "Worker threads that keep their scratch between batches.")
      .def(py::init<int>(), py::arg("num_threads"))
      .def_property_readonly("num_threads", &ThreadPool::num_threads);
}

}  // namespace trtpu
