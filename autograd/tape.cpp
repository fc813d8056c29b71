#include "autograd/tape.h"

#include <algorithm>
#include <map>
#include <utility>

#include "autograd/context.h"
#include "kernels/pointwise.h"
#include "runtime/error.h"

namespace detr {
namespace {

constexpr std::size_t kMaxInputs = 32;   // of an op: GradientRules have a bit for each

/// Whether nothing of this step lies in rows [begin, end) of the parameter's gradient yet; from now on something does.
bool claim_rows(Parameter::State& state, std::int64_t begin, std::int64_t end) {
  for (const auto& [from, to] : state.written) {
    if (from == begin && to == end) return false;
    DETR_CHECK(end <= from || to <= begin, "tape: ", state.name, " is used by overlapping parts of its rows");
  }
  state.written.emplace_back(begin, end);
  return true;
}

}  // namespace

int Tape::append(Node node) {
  nodes_.push_back(std::move(node));
  return static_cast<int>(nodes_.size()) - 1;
}

Variable Tape::input(const Tensor& value) {
  Node node;
  node.name = "input";
  node.shape = value.shape();
  node.dtype = value.dtype();
  node.is_input = true;
  return {value, append(std::move(node))};
}

Variable Tape::leaf(const Parameter& parameter, std::int64_t begin, std::int64_t end) {
  const Tensor value = rows_of(parameter.value(), begin, end);
  if (!parameter.trainable()) return Variable(value);
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    if (node.is_parameter && node.parameter.index() == parameter.index() && node.begin == begin && node.end == end)
      return {value, static_cast<int>(i)};
  }
  Node node;
  node.name = parameter.name();
  node.shape = value.shape();
  node.dtype = parameter.grad().dtype();
  node.parameter = parameter;
  node.begin = begin;
  node.end = end;
  node.is_parameter = true;
  return {value, append(std::move(node))};
}

Variable Tape::record(const char* name, std::span<const Variable> inputs, const Tensor& y, Backward backward, GradientRules rules) {
  DETR_CHECK(inputs.size() <= kMaxInputs, name, ": ", inputs.size(), " inputs, at most ", kMaxInputs);
  Node node;
  node.name = name;
  node.shape = y.shape();
  node.dtype = y.dtype();
  for (const Variable& input : inputs) node.inputs.push_back(input.node());
  node.backward = std::move(backward);
  node.rules = rules;
  return {y, append(std::move(node))};
}

void Tape::backward(Context& ctx, const Variable& loss, const std::function<void(const Parameter&)>& on_ready, const std::function<void()>& on_counted) {
  DETR_CHECK(loss.value().numel() == 1, "backward: the loss must have one element, got ", loss.value());
  Tensor one = ctx.empty_like(loss.value());
  kernels::fill(ctx.stream(), 1.0, one);
  backward(ctx, loss, one, on_ready, on_counted);
}

void Tape::backward(Context& ctx, const Variable& output, const Tensor& seed, const std::function<void(const Parameter&)>& on_ready,
                    const std::function<void()>& on_counted) {
  reached_.clear();
  if (!output.wants_grad()) {   // a constant: every parameter is missing
    if (on_counted) on_counted();
    return;
  }
  expect_like(output.value(), "backward: seed", seed, output.shape());

  // From the output, not from all nodes: what the output ignores must not be waited for. Counts the contributions that each
  // parameter will get.
  const auto last = static_cast<std::size_t>(output.node());
  std::vector<char> live(last + 1, 0);
  std::map<std::int64_t, int> contributions;
  live[last] = 1;
  for (std::size_t i = 0; i <= last; ++i) {
    nodes_[i].uses = 0;
    nodes_[i].before_relu = false;
  }
  for (std::size_t i = last + 1; i-- > 0;) {
    if (!live[i]) continue;
    const bool is_leaf = nodes_[i].is_parameter || nodes_[i].is_input;
    DETR_CHECK(is_leaf || nodes_[i].backward, "tape: backward has run already; clear the tape and run the forward again");
    for (const int input : nodes_[i].inputs) {
      if (input < 0) continue;
      Node& source = nodes_[static_cast<std::size_t>(input)];
      live[static_cast<std::size_t>(input)] = 1;
      ++source.uses;
      if (!source.is_parameter) continue;
      ++contributions[source.parameter.index()];
      reached_.insert(source.parameter.index());
    }
  }

  if (nodes_[last].is_parameter) {   // no op between: the seed is the parameter's one contribution
    const Node& leaf = nodes_[last];
    reached_.insert(leaf.parameter.index());
    if (on_counted) on_counted();
    Tensor rows = rows_of(leaf.parameter.grad(), leaf.begin, leaf.end);
    if (claim_rows(leaf.parameter.state(), leaf.begin, leaf.end)) kernels::cast(ctx.stream(), seed, rows);
    else kernels::accumulate(ctx.stream(), seed, rows);
    if (on_ready) on_ready(leaf.parameter);
    return;
  }
  if (on_counted) on_counted();
  nodes_[last].grad = seed;
  for (std::size_t i = last + 1; i-- > 0;) {
    Node& node = nodes_[i];
    if (!live[i] || !node.backward) continue;
    run_node(ctx, node);
    if (observer) observer(node.name, node.grad);
    node.backward = nullptr;   // what it saved is free from here on
    node.grad = Tensor();
    for (const int input : node.inputs) {
      if (input < 0) continue;
      const Node& source = nodes_[static_cast<std::size_t>(input)];
      if (source.is_parameter && --contributions[source.parameter.index()] == 0 && on_ready) on_ready(source.parameter);
    }
  }
}

/// Whether an input's gradient is the node's own, in the same memory.
bool Tape::passes_on(const Node& node, std::size_t input) const {
  const Node& source = nodes_[static_cast<std::size_t>(node.inputs[input])];
  if (source.is_input || source.grad.defined()) return false;
  if ((node.rules.passes >> input & 1U) != 0 && source.uses == 1) return true;
  // A gradient that was taken back through the node's ReLU has been handed to nobody else, and the node reads it before others add to it; but
  // for a node that would add to it by itself.
  return node.before_relu && (node.rules.passes_before_relu >> input & 1U) != 0 && std::ranges::count(node.inputs, node.inputs[input]) == 1;
}

void Tape::run_node(Context& ctx, Node& node) {
  const std::size_t count = node.inputs.size();
  std::vector<Tensor> destinations(count);
  std::vector<Tensor*> want(count, nullptr);
  unsigned adds = 0, masks = 0;
  std::vector<Tensor> sums(count);   // defined where the destination is a contribution that must be added here
  for (std::size_t i = 0; i < count; ++i) {
    if (node.inputs[i] < 0) continue;
    Node& source = nodes_[static_cast<std::size_t>(node.inputs[i])];
    if (source.is_parameter) {
      const Tensor rows = rows_of(source.parameter.grad(), source.begin, source.end);
      if (claim_rows(source.parameter.state(), source.begin, source.end)) {
        destinations[i] = rows;
      } else {
        sums[i] = rows;
      }
    } else if (passes_on(node, i)) {
      source.grad = node.grad.reshape(source.shape);
      --source.uses;
      continue;
    } else if (!source.grad.defined()) {
      source.grad = ctx.empty(source.shape, source.dtype);
      destinations[i] = source.grad;
    } else {
      sums[i] = source.grad;
    }
    if (sums[i].defined() && (node.rules.adds >> i & 1U) != 0) {
      if (ctx.side) ctx.side->settle(sums[i]);   // the op adds on the stream
      destinations[i] = std::exchange(sums[i], Tensor());
      adds |= 1U << i;
    }
    if (sums[i].defined()) destinations[i] = ctx.empty(source.shape, source.dtype);
    want[i] = &destinations[i];
    --source.uses;
    if (source.uses == 0 && source.rules.ends_in_relu && (node.rules.masks >> i & 1U) != 0 && !sums[i].defined()) {
      source.before_relu = true;
      masks |= 1U << i;
    }
  }
  ctx.set_rules(adds, masks, node.before_relu);
  node.backward(ctx, node.grad, want);
  ctx.set_rules(0, 0, false);
  for (std::size_t i = 0; i < count; ++i) {
    if (!want[i]) continue;
    // The side branch may have made what the stream reads or adds to from here on: all but parameters' gradients.
    const bool is_parameter = nodes_[static_cast<std::size_t>(node.inputs[i])].is_parameter;
    if (ctx.side && !is_parameter) {
      ctx.side->settle(destinations[i]);
      if (sums[i].defined()) ctx.side->settle(sums[i]);
    }
    if (!sums[i].defined()) continue;
    const auto add = [&](const Stream& stream) { kernels::accumulate(stream, destinations[i], sums[i]); };
    if (is_parameter) ctx.beside({destinations[i], sums[i]}, add);
    else add(ctx.stream());
  }
}

const Tensor& Tape::gradient(const Variable& input) const {
  DETR_CHECK(input.node() >= 0 && static_cast<std::size_t>(input.node()) < nodes_.size() &&
                 nodes_[static_cast<std::size_t>(input.node())].is_input,
             "tape: gradient of something that is no input");
  return nodes_[static_cast<std::size_t>(input.node())].grad;
}

void Tape::clear() {
  nodes_.clear();
  reached_.clear();
}

}  // namespace detr
