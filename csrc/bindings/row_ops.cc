#include "trtpu/row_ops.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "registers.h"

namespace py = pybind11;

namespace trtpu {
namespace {

[[noreturn]] void ThrowWrongType(const py::handle& object, const std::string& name,
                                 const std::string& wanted) {
  throw py::type_error(name + ": wanted a numpy array of " + wanted + ", got " +
                       py::repr(py::type::of(object)).cast<std::string>() +
                       (py::isinstance<py::array>(object)
                            ? " of " + py::str(object.attr("dtype")).cast<std::string>()
                            : std::string()));
}

// The memory of a C-contiguous array of T, checked; nothing is ever copied.
template <class T>
std::span<T> Borrow(const py::handle& object, const std::string& name) {
  using Element = std::remove_const_t<T>;
  if (!py::isinstance<py::array_t<Element>>(object))
    ThrowWrongType(object, name, py::str(py::dtype::of<Element>()).cast<std::string>());
  const auto array = py::reinterpret_borrow<py::array>(object);
  const bool aligned = reinterpret_cast<std::uintptr_t>(array.data()) % alignof(Element) == 0;
  if (!(array.flags() & py::array::c_style) || !aligned)
    throw py::value_error(name + ": wanted a contiguous array");
  if (!std::is_const_v<T> && !array.writeable()) throw py::value_error(name + ": is read-only");
  return {const_cast<T*>(static_cast<const T*>(array.data())),
          static_cast<std::size_t>(array.size())};
}

template <class T>
std::span<T> Borrow(const py::handle& object, const std::string& name,
                    const std::vector<std::int64_t>& shape) {
  const std::span<T> span = Borrow<T>(object, name);
  const auto array = py::reinterpret_borrow<py::array>(object);
  if (!std::equal(shape.begin(), shape.end(), array.shape(), array.shape() + array.ndim())) {
    throw py::value_error(name + ": wanted shape " +
                          py::str(py::tuple(py::cast(shape))).cast<std::string>() + ", got " +
                          py::str(object.attr("shape")).cast<std::string>());
  }
  return span;
}

// The memory of a table's weights, checked; float32 or float16.
template <class Weights, class Float, class Bits>
Weights BorrowWeights(const py::handle& object, std::size_t table, const TableGeometry& geometry) {
  const std::string name = "table " + std::to_string(table);
  const std::vector<std::int64_t> shape = {geometry.num_embeddings, geometry.dim};
  if (py::isinstance<py::array_t<float>>(object))
    return {Borrow<Float>(object, name, shape).data(), false};
  if (!py::isinstance<py::array>(object) ||
      !py::reinterpret_borrow<py::array>(object).dtype().equal(py::dtype("e")))
    ThrowWrongType(object, name, "float32 or float16");
  const py::object bits = object.attr("view")(py::dtype::of<std::uint16_t>());
  return {Borrow<Bits>(bits, name, shape).data(), true};
}

Geometry DecodeGeometry(const std::vector<std::int64_t>& ints) {
  Geometry geometry;
  if (const std::string error = geometry.Decode(ints); !error.empty()) throw py::value_error(error);
  return geometry;
}

std::vector<PackedStack> BorrowStacks(const py::sequence& buffers, const Geometry& geometry) {
  if (static_cast<std::int64_t>(buffers.size()) != 4 * geometry.num_stacks)
    throw py::value_error("wanted 4 buffers for each of " + std::to_string(geometry.num_stacks) +
                          " stacks, got " + std::to_string(buffers.size()));
  std::vector<PackedStack> stacks;
  for (std::size_t s = 0; s < buffers.size(); s += 4) {
    const std::string stack = "stack " + std::to_string(s / 4) + " ";
    stacks.push_back({Borrow<const std::int32_t>(buffers[s], stack + "row_pointers"),
                      Borrow<const std::int32_t>(buffers[s + 1], stack + "embedding_ids"),
                      Borrow<const std::int32_t>(buffers[s + 2], stack + "sample_ids"),
                      Borrow<const float>(buffers[s + 3], stack + "gains")});
  }
  return stacks;
}

void CheckCount(std::size_t got, std::size_t wanted, const std::string& what) {
  if (got != wanted)
    throw py::value_error("wanted " + std::to_string(wanted) + " " + what + ", got " +
                          std::to_string(got));
}

void Lookup(RowOps& ops, const py::sequence& buffers, const py::sequence& tables,
            const std::vector<std::int64_t>& geometry_ints, const py::object& out) {
  const Geometry geometry = DecodeGeometry(geometry_ints);
  const std::vector<PackedStack> stacks = BorrowStacks(buffers, geometry);
  CheckCount(tables.size(), geometry.tables.size(), "tables");
  std::vector<ConstWeights> weights;
  for (std::size_t t = 0; t < tables.size(); ++t)
    weights.push_back(BorrowWeights<ConstWeights, const float, const std::uint16_t>(
        tables[t], t, geometry.tables[t]));
  const std::span<float> floats = Borrow<float>(out, "out");
  std::string error;
  {
    const py::gil_scoped_release release;
    error = ops.Lookup(geometry, stacks, weights, floats);
  }
  if (!error.empty()) throw py::value_error(error);
}

void Update(RowOps& ops, const py::object& grad, const py::sequence& buffers,
            const py::sequence& tables, const py::sequence& slots, const py::object& operands,
            const std::vector<std::int64_t>& geometry_ints, const std::string& rule,
            float max_gradient) {
  const Geometry geometry = DecodeGeometry(geometry_ints);
  const std::vector<PackedStack> stacks = BorrowStacks(buffers, geometry);
  const std::optional<RuleShape> shape = FindRule(rule);
  if (!shape) throw py::value_error("no fused update for rule '" + rule + "'");
  CheckCount(tables.size(), geometry.tables.size(), "tables");
  CheckCount(slots.size(), geometry.tables.size(), "lists of slots");
  std::vector<TableState> states;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const TableGeometry& table = geometry.tables[t];
    const std::string name = "table " + std::to_string(t);
    TableState& state = states.emplace_back();
    state.weights = BorrowWeights<Weights, float, std::uint16_t>(tables[t], t, table);
    const auto table_slots = slots[t].cast<py::sequence>();
    for (const py::handle slot : table_slots) {
      const std::string slot_name = "slot of " + name;
      if (py::isinstance<py::array>(slot) && py::reinterpret_borrow<py::array>(slot).ndim() == 1)
        state.scalar_slots.push_back(Borrow<float>(slot, slot_name, {table.num_embeddings}).data());
      else
        state.row_slots.push_back(
            Borrow<float>(slot, slot_name, {table.num_embeddings, table.dim}).data());
    }
    CheckCount(state.row_slots.size(), shape->num_row_slots, "row slots of " + name);
    CheckCount(state.scalar_slots.size(), shape->num_scalar_slots, "scalar slots of " + name);
  }
  const std::span<const float> gradient = Borrow<const float>(grad, "grad");
  const std::span<const float> factors = Borrow<const float>(
      operands, "operands", {static_cast<std::int64_t>(tables.size()), shape->num_operands});
  std::string error;
  {
    const py::gil_scoped_release release;
    error = ops.Update(geometry, stacks, states, gradient, factors, rule, max_gradient);
  }
  if (!error.empty()) throw py::value_error(error);
}

}  // namespace

void RegisterRowOps(py::module_& m) {
  py::class_<RowOps>(m, "RowOps", "Lookup and fused update straight from packed buffers.")
      .def(py::init<ThreadPool&>(), py::arg("pool"), py::keep_alive<1, 2>())
      .def("lookup", &Lookup, py::arg("buffers"), py::arg("tables"), py::arg("geometry"),
           py::arg("out"))
      .def("update", &Update, py::arg("grad"), py::arg("buffers"), py::arg("tables"),
           py::arg("slots"), py::arg("operands"), py::arg("geometry"), py::arg("rule"),
           py::arg("max_gradient") = 0.0f);
  m.def("rules", &RuleNames, "Names of the optimizer rules that have a fused update.");
  m.def("instruction_sets", &InstructionSets, "What this machine runs, the widest first.");
  m.def("instruction_set", &InstructionSet, "The instruction set in use.");
  m.def(
      "set_instruction_set",
      [](const std::string& name) {
        if (!SetInstructionSet(name))
          throw py::value_error("instruction set '" + name + "' does not run here");
      },
      py::arg("name"), "Use one of instruction_sets() from now on, in the whole process.");
}

}  // namespace trtpu
