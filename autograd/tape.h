#pragma once
#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "autograd/parameter.h"
#include "autograd/variable.h"
#include "runtime/stream.h"

namespace detr {

class Context;

/// One destination per input of an op, null where no gradient is wanted. The op overwrites each that is not null.
using Wanted = std::span<Tensor* const>;
/// Computes the wanted gradients of an op from the gradient of its output.
using Backward = std::function<void(Context& ctx, const Tensor& dy, Wanted want)>;

/// What an op promises of its inputs' gradients; bit i is input i.
struct GradientRules {
  unsigned adds = 0;     ///< it can add to what the destination holds: see Context::adds
  unsigned passes = 0;   ///< it is the output's gradient, in the input's shape: where nothing else uses the input, the tape hands it on
  unsigned masks = 0;    ///< it can be taken back through the ReLU that made the input: see Context::masks
  bool ends_in_relu = false;         ///< the op also takes a gradient that has been taken back through its ReLU: see Context::before_relu
  unsigned passes_before_relu = 0;   ///< it is that gradient, in the input's shape: the tape hands it on, whatever else uses the input
};

/// Nodes in the order in which the ops ran; backward goes through them from the end. Contributions are added in tape order, by the
/// tape: kernels overwrite, but for those of ops whose rules say that they can add. For one forward and one backward, then cleared.
class Tape {
 public:
  /// A leaf whose gradient is kept on the tape (tests, inputs of a checked function).
  Variable input(const Tensor& value);
  /// Rows [begin, end) of a parameter; a constant if the parameter is not trained. Same rows, same node. The gradient goes
  /// straight into the parameter's slice of the gradient buffer.
  Variable leaf(const Parameter& parameter, std::int64_t begin, std::int64_t end);
  /// Appends the node of an op; inputs that want no gradient are remembered as such.
  Variable record(const char* name, std::span<const Variable> inputs, const Tensor& y, Backward backward, GradientRules rules = {});

  /// Backward from a scalar with gradient 1, or from any variable with the gradient given. `on_counted` is called before anything is
  /// computed, when reached() is known, `on_ready` for each parameter once its last contribution of this pass has been computed
  /// or, where the context has a side branch, is on its way there.
  void backward(Context& ctx, const Variable& loss, const std::function<void(const Parameter&)>& on_ready = {}, const std::function<void()>& on_counted = {});
  void backward(Context& ctx, const Variable& output, const Tensor& seed, const std::function<void(const Parameter&)>& on_ready = {},
                const std::function<void()>& on_counted = {});

  /// After backward: the gradient of an input(), undefined if the output does not depend on it.
  const Tensor& gradient(const Variable& input) const;
  /// After backward: whether the output reached the parameter. One that it did not reach is missing: neither zero nor an error.
  bool reached(const Parameter& parameter) const { return reached_.contains(parameter.index()); }

  /// Called after each node's backward with its name and output gradient (a debugging aid).
  std::function<void(const std::string& name, const Tensor& gradient)> observer;

  std::size_t size() const { return nodes_.size(); }
  void clear();

 private:
  struct Node {
    std::string name;
    std::vector<int> inputs;       // node of each input, -1 where none is wanted
    Shape shape;
    DType dtype = DType::f32;
    Backward backward;             // empty for leaves
    GradientRules rules;
    int uses = 0;                  // by live nodes, in the pass in hand, that are still to come
    bool before_relu = false;      // grad has been taken back through the op's ReLU
    Tensor grad;
    Parameter parameter;           // of a parameter leaf
    std::int64_t begin = 0, end = 0;
    bool is_parameter = false;
    bool is_input = false;
  };

  int append(Node node);
  void run_node(Context& ctx, Node& node);
  bool passes_on(const Node& node, std::size_t input) const;

  std::vector<Node> nodes_;
  std::set<std::int64_t> reached_;
};

}  // namespace detr
