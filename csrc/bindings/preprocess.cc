#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "registers.h"
#include "trtpu/partition.h"
#include "trtpu/thread_pool.h"

namespace py = pybind11;

namespace trtpu {
namespace {

using Int32Array = py::array_t<std::int32_t>;
using Int64Array = py::array_t<std::int64_t>;

constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();

template <class T>
bool HasType(const py::array& array) {
  return py::isinstance<py::array_t<T>>(array);
}

std::string Describe(const py::array& array) {
  return std::string(py::str(py::handle(array.dtype()))) + " of shape " +
         std::string(py::str(array.attr("shape")));
}

// Checks that `array` is one-dimensional, contiguous and, unless `size` < 0, of that size.
void CheckShape(const char* name, const py::array& array, std::int64_t size) {
  if (array.ndim() != 1 || !(array.flags() & py::array::c_style) ||
      !(array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_)) {
    throw py::value_error(std::string(name) + " must be one-dimensional and contiguous, got " +
                          Describe(array));
  }
  if (size >= 0 && array.size() != size) {
    throw py::value_error(std::string(name) + " must have " + std::to_string(size) +
                          " elements, got " + std::to_string(array.size()));
  }
}

// A borrowed int32 or int64 array.
IntArray Ints(const char* name, const py::array& array, std::int64_t size) {
  if (!HasType<std::int32_t>(array) && !HasType<std::int64_t>(array)) {
    throw py::type_error(std::string(name) + " must be int32 or int64, got " + Describe(array));
  }
  CheckShape(name, array, size);
  return {.data = array.data(), .size = array.size(), .is_64bit = HasType<std::int64_t>(array)};
}

template <class T>
const T* Typed(const char* name, const py::array& array, std::int64_t size) {
  if (!HasType<T>(array)) {
    throw py::type_error(std::string(name) + " must be " +
                         std::string(py::str(py::handle(py::dtype::of<T>()))) + ", got " +
                         Describe(array));
  }
  CheckShape(name, array, size);
  return static_cast<const T*>(array.data());
}

// An array that is written; `size` < 0 takes any.
template <class T>
T* Output(const char* name, const py::handle& object, std::int64_t size) {
  if (!py::isinstance<py::array>(object)) {
    throw py::type_error(std::string(name) + " must be a numpy array");
  }
  const auto array = py::reinterpret_borrow<py::array>(object);
  const T* data = Typed<T>(name, array, size);
  if (!array.writeable()) throw py::value_error(std::string(name) + " must be writeable");
  return const_cast<T*>(data);
}

// What Partition() found, or the problem that it met.
struct PartitionResult {
  Int64Array samples_per_core;
  Int64Array num_samples;
  Int32Array ids;
  Int32Array unique_ids;
  Int32Array table_max_ids;
  Int32Array table_max_unique_ids;
  Int64Array num_invalid;
  py::object error = py::none();
};

const char* KindName(PartitionProblem::Kind kind) {
  switch (kind) {
    case PartitionProblem::kLength:
      return "length";
    case PartitionProblem::kOffset:
      return "offset";
    case PartitionProblem::kTotal:
      return "total";
    default:
      return "id";
  }
}

class PyPartitioner {
 public:
  PyPartitioner(Layout layout, ThreadPool& pool) : partitioner_(std::move(layout), pool) {}

  PartitionResult Partition(const py::array& values, const std::optional<py::array>& lengths,
                            const std::optional<py::array>& offsets,
                            const std::optional<py::array>& weights,
                            const py::array& key_of_feature, std::int64_t num_keys,
                            std::int64_t batch_size, std::int64_t padded_batch_size,
                            std::int32_t id_policy) {
    const Layout& layout = partitioner_.layout();
    if (num_keys < 0 || batch_size < 0 || num_keys > kInt32Max || batch_size > kInt32Max) {
      throw py::value_error("num_keys=" + std::to_string(num_keys) + " and batch_size=" +
                            std::to_string(batch_size) + " must be in 0..2^31-1");
    }
    if (padded_batch_size < batch_size || padded_batch_size % layout.num_local_cores != 0) {
      throw py::value_error("padded_batch_size=" + std::to_string(padded_batch_size) +
                            " must be a multiple of " + std::to_string(layout.num_local_cores) +
                            " (local cores), at least batch_size=" + std::to_string(batch_size));
    }
    if (id_policy < 0 || id_policy > 2) {
      throw py::value_error("id_policy=" + std::to_string(id_policy) +
                            " is not 0 (error), 1 (clamp) or 2 (drop)");
    }
    if (lengths.has_value() == offsets.has_value()) {
      throw py::value_error("give either lengths or offsets");
    }
    const std::int64_t num_bags = num_keys * batch_size;
    KjtView kjt;
    kjt.values = Ints("values", values, -1);
    if (kjt.values.size > kInt32Max) {
      throw py::value_error("values has " + std::to_string(kjt.values.size) +
                            " ids; a batch holds at most 2^31-1");
    }
    if (lengths) kjt.lengths = Ints("lengths", *lengths, num_bags);
    if (offsets) kjt.offsets = Ints("offsets", *offsets, num_bags + 1);
    if (weights) kjt.weights = Typed<float>("weights", *weights, kjt.values.size);
    kjt.key_of_feature = {
        Typed<std::int32_t>("key_of_feature", key_of_feature, layout.num_features()),
        layout.combiners.size()};
    for (const std::int32_t key : kjt.key_of_feature) {
      if (key < 0 || key >= num_keys) {
        throw py::value_error("key_of_feature names column " + std::to_string(key) +
                              ", there are " + std::to_string(num_keys));
      }
    }
    kjt.num_keys = num_keys;
    kjt.batch_size = batch_size;

    const py::ssize_t num_features = layout.num_features(), num_tables = layout.num_tables();
    const std::vector<py::ssize_t> counts_shape = {layout.num_stacks, layout.num_local_cores,
                                                   layout.num_cores};
    PartitionResult result{.samples_per_core = Int64Array(num_features),
                           .num_samples = Int64Array(num_features),
                           .ids = Int32Array(counts_shape),
                           .unique_ids = Int32Array(counts_shape),
                           .table_max_ids = Int32Array(num_tables),
                           .table_max_unique_ids = Int32Array(num_tables),
                           .num_invalid = Int64Array(num_features)};
    const Stats stats = {.samples_per_core = result.samples_per_core.mutable_data(),
                         .num_samples = result.num_samples.mutable_data(),
                         .ids = result.ids.mutable_data(),
                         .unique_ids = result.unique_ids.mutable_data(),
                         .table_max_ids = result.table_max_ids.mutable_data(),
                         .table_max_unique_ids = result.table_max_unique_ids.mutable_data(),
                         .num_invalid = result.num_invalid.mutable_data()};
    PartitionProblem problem;
    {
      const py::gil_scoped_release release;
      const std::lock_guard turn(turn_);
      problem =
          partitioner_.Partition(kjt, padded_batch_size, static_cast<IdPolicy>(id_policy), stats);
    }
    if (problem.kind == PartitionProblem::kTooLarge) {
      throw py::value_error("stack " + std::to_string(problem.index) + " needs " +
                            std::to_string(problem.value) +
                            " samples or slots on one core; the buffers number 2^31-1");
    }
    if (problem.kind != PartitionProblem::kNone) {
      result.error = py::make_tuple(KindName(problem.kind), problem.index, problem.sample,
                                    problem.position, problem.value);
    }
    return result;
  }

  void Pack(const py::list& row_pointers, const py::list& embedding_ids, const py::list& sample_ids,
            const py::list& gains) {
    const Layout& layout = partitioner_.layout();
    const std::size_t num_stacks = static_cast<std::size_t>(layout.num_stacks);
    for (const py::list* list : {&row_pointers, &embedding_ids, &sample_ids, &gains}) {
      if (list->size() != num_stacks) {
        throw py::value_error("pack() takes lists of " + std::to_string(num_stacks) +
                              " arrays, one per stack, got " + std::to_string(list->size()));
      }
    }
    const std::int64_t num_local = layout.num_local_cores;
    std::vector<StackBuffers> stacks(num_stacks);
    for (std::size_t s = 0; s < num_stacks; ++s) {
      StackBuffers& stack = stacks[s];
      stack.row_pointers = Output<std::int32_t>("row_pointers", row_pointers[s],
                                                num_local * NumRowPointers(layout.num_cores));
      stack.embedding_ids = Output<std::int32_t>("embedding_ids", embedding_ids[s], -1);
      stack.num_slots = py::len(embedding_ids[s]);
      stack.sample_ids = Output<std::int32_t>("sample_ids", sample_ids[s], stack.num_slots);
      stack.gains = Output<float>("gains", gains[s], stack.num_slots);
    }
    std::string problem;
    {
      const py::gil_scoped_release release;
      const std::lock_guard turn(turn_);
      problem = CheckBuffers(stacks);
      if (problem.empty()) partitioner_.Pack(stacks);
    }
    if (!problem.empty()) throw py::value_error(problem);
  }

 private:
  [[nodiscard]] std::string CheckBuffers(const std::vector<StackBuffers>& stacks) const {
    if (!partitioner_.has_batch()) return "pack() needs a partition() that succeeded";
    const std::int64_t num_local = partitioner_.layout().num_local_cores;
    for (std::size_t i = 0; i < partitioner_.num_slots().size(); ++i) {
      const std::size_t s = i / static_cast<std::size_t>(num_local);
      const std::int64_t slots = stacks[s].num_slots, wanted = partitioner_.num_slots()[i];
      if (slots % num_local != 0 || slots / num_local < wanted) {
        return "stack " + std::to_string(s) + ": embedding_ids has " + std::to_string(slots) +
               " slots for " + std::to_string(num_local) + " cores; core " +
               std::to_string(i % static_cast<std::size_t>(num_local)) + " needs " +
               std::to_string(wanted);
      }
    }
    return {};
  }

  Partitioner partitioner_;
  std::mutex turn_;
};

std::unique_ptr<PyPartitioner> MakePartitioner(const py::array& tables, const py::array& combiners,
                                               std::int32_t num_stacks, std::int32_t num_cores,
                                               std::int32_t num_local_cores, ThreadPool& pool,
                                               const std::optional<py::array>& sequences) {
  if (!HasType<std::int64_t>(tables) || !(tables.flags() & py::array::c_style) ||
      tables.ndim() != 2 || tables.shape(1) != 7) {
    throw py::value_error("tables must be a contiguous int64 array of shape (T, 7), got " +
                          Describe(tables));
  }
  const std::int32_t* combiner = Typed<std::int32_t>("combiners", combiners, -1);
  Layout layout{.tables = {},
                .combiners = {},
                .sequence_samples_per_core = {},
                .num_stacks = num_stacks,
                .num_cores = num_cores,
                .num_local_cores = num_local_cores};
  const auto* row = static_cast<const std::int64_t*>(tables.data());
  for (py::ssize_t t = 0; t < tables.shape(0); ++t, row += 7) {
    for (const std::int64_t small : {row[0], row[4], row[5]}) {
      if (small < 0 || small > kInt32Max) {
        throw py::value_error("table " + std::to_string(t) + ": " + std::to_string(small) +
                              " is no stack, feature or number of features");
      }
    }
    layout.tables.push_back({.stack = static_cast<std::int32_t>(row[0]),
                             .num_embeddings = row[1],
                             .row_offset = row[2],
                             .rotation = row[3],
                             .first_feature = static_cast<std::int32_t>(row[4]),
                             .num_features = static_cast<std::int32_t>(row[5]),
                             .block_rows = row[6]});
  }
  for (py::ssize_t f = 0; f < combiners.size(); ++f) {
    layout.combiners.push_back(static_cast<Combiner>(combiner[f]));
  }
  if (sequences) {
    const std::int64_t* samples =
        Typed<std::int64_t>("sequence_samples_per_core", *sequences, combiners.size());
    layout.sequence_samples_per_core.assign(samples, samples + combiners.size());
  }
  if (const std::string problem = CheckLayout(layout); !problem.empty()) {
    throw py::value_error(problem);
  }
  return std::make_unique<PyPartitioner>(std::move(layout), pool);
}

}  // namespace

void RegisterPreprocess(py::module_& m) {
  py::class_<PartitionResult>(m, "Partition", "What one batch asks of the buffers.")
      .def_readonly("samples_per_core", &PartitionResult::samples_per_core)
      .def_readonly("num_samples", &PartitionResult::num_samples)
      .def_readonly("ids", &PartitionResult::ids)
      .def_readonly("unique_ids", &PartitionResult::unique_ids)
      .def_readonly("table_max_ids", &PartitionResult::table_max_ids)
      .def_readonly("table_max_unique_ids", &PartitionResult::table_max_unique_ids)
      .def_readonly("num_invalid", &PartitionResult::num_invalid)
      .def_readonly("error", &PartitionResult::error);

  py::class_<PyPartitioner>(m, "Partitioner", "Sorts, merges and packs KJT batches for one layout.")
      .def(py::init(&MakePartitioner), py::arg("tables"), py::arg("combiners"),
           py::arg("num_stacks"), py::arg("num_cores"), py::arg("num_local_cores"), py::arg("pool"),
           py::arg("sequence_samples_per_core") = py::none(), py::keep_alive<1, 7>())
      .def("partition", &PyPartitioner::Partition, py::arg("values"), py::arg("lengths"),
           py::arg("offsets"), py::arg("weights"), py::arg("key_of_feature"), py::arg("num_keys"),
           py::arg("batch_size"), py::arg("padded_batch_size"), py::arg("id_policy"))
      .def("pack", &PyPartitioner::Pack, py::arg("row_pointers"), py::arg("embedding_ids"),
           py::arg("sample_ids"), py::arg("gains"));
}

}  // namespace trtpu
