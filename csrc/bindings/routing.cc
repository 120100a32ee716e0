#include "trtpu/routing.h"

#include <pybind11/numpy.h>

#include "registers.h"

namespace py = pybind11;

namespace trtpu {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
std::span<const T> View(const Array<T>& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

template <class T>
std::span<T> MutableView(Array<T>& array) {
  return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

void Number(ThreadPool& pool, const Array<std::int32_t>& row_pointers,
            const Array<std::int32_t>& embedding_ids, const Array<std::int32_t>& sample_ids,
            const Array<std::int32_t>& table_rows, std::int64_t num_samples,
            std::int64_t num_partitions, Array<std::int32_t>& numbers, Array<std::int32_t>& samples,
            Array<std::int64_t>& counts) {
  const SourceStack stack = {View(row_pointers), View(embedding_ids), View(sample_ids),
                             View(table_rows),   num_samples,         num_partitions};
  const py::ssize_t slots = embedding_ids.size();
  if (num_partitions < 0 || row_pointers.size() < num_partitions || num_samples < 0 ||
      sample_ids.size() != slots || numbers.size() != slots || samples.size() != slots ||
      table_rows.size() < 1 || counts.size() != num_partitions * table_rows.size())
    throw py::value_error("arrays whose sizes do not fit each other");
  std::string error;
  {
    const auto mutable_numbers = MutableView(numbers), mutable_samples = MutableView(samples);
    const auto mutable_counts = MutableView(counts);
    const py::gil_scoped_release release;
    error = NumberSamples(stack, mutable_numbers, mutable_samples, mutable_counts, pool);
  }
  if (!error.empty()) throw py::value_error(error);
}

VectorRuns Runs(const Array<std::int64_t>& offsets, const Array<std::int64_t>& counts,
                const Array<std::int64_t>& widths, py::ssize_t packed, py::ssize_t spread) {
  const VectorRuns runs = {View(offsets), View(counts), View(widths)};
  const std::string error =
      CheckRuns(runs, static_cast<std::size_t>(packed), static_cast<std::size_t>(spread));
  if (!error.empty()) throw py::value_error(error);
  return runs;
}

void Gather(ThreadPool& pool, const Array<float>& spread, const Array<std::int64_t>& offsets,
            const Array<std::int64_t>& counts, const Array<std::int64_t>& widths, float divisor,
            Array<float>& packed) {
  const VectorRuns runs = Runs(offsets, counts, widths, packed.size(), spread.size());
  const float* from = spread.data();
  float* to = packed.mutable_data();
  const py::gil_scoped_release release;
  GatherVectors(runs, from, divisor, to, pool);
}

void Add(ThreadPool& pool, const Array<float>& packed, const Array<std::int64_t>& offsets,
         const Array<std::int64_t>& counts, const Array<std::int64_t>& widths,
         Array<float>& spread) {
  const VectorRuns runs = Runs(offsets, counts, widths, packed.size(), spread.size());
  const float* from = packed.data();
  float* to = spread.mutable_data();
  const py::gil_scoped_release release;
  AddVectors(runs, from, to, pool);
}

}  // namespace

void RegisterRouting(py::module_& m) {
  m.def("number_samples", &Number, py::arg("pool"), py::arg("row_pointers").noconvert(),
        py::arg("embedding_ids").noconvert(), py::arg("sample_ids").noconvert(),
        py::arg("table_rows").noconvert(), py::arg("num_samples"), py::arg("num_partitions"),
        py::arg("numbers").noconvert(), py::arg("samples").noconvert(),
        py::arg("counts").noconvert());
  m.def("gather_vectors", &Gather, py::arg("pool"), py::arg("spread").noconvert(),
        py::arg("offsets").noconvert(), py::arg("counts").noconvert(),
        py::arg("widths").noconvert(), py::arg("divisor"), py::arg("packed").noconvert());
  m.def("add_vectors", &Add, py::arg("pool"), py::arg("packed").noconvert(),
        py::arg("offsets").noconvert(), py::arg("counts").noconvert(),
        py::arg("widths").noconvert(), py::arg("spread").noconvert());
}

}  // namespace trtpu
