// Batch norms whose statistics several ranks share; the ranks are threads here.
#include "autograd/statistics.h"

#include <barrier>
#include <cstring>
#include <thread>

#include "autograd/norm.h"
#include "tests/autograd/expect_gradients.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

/// Where the ranks' threads meet.
struct Meeting {
  explicit Meeting(int ranks) : parts(static_cast<std::size_t>(ranks)), barrier(ranks) {}
  std::vector<Tensor> parts;
  std::barrier<> barrier;
};

/// One rank's end. Notes the calls.
class Threads final : public SharedStatistics {
 public:
  Threads(Meeting& meeting, int rank) : meeting_(meeting), rank_(static_cast<std::size_t>(rank)) {}
  int ranks() const override { return static_cast<int>(meeting_.parts.size()); }
  int gather_forward(const Stream&, const Tensor& mine, Tensor& all) override {
    gather(mine, all);
    return forward_calls++;
  }
  void gather_backward(const Stream&, int call, const Tensor& mine, Tensor& all) override {
    gather(mine, all);
    backward_calls.push_back(call);
  }
  int forward_calls = 0;
  std::vector<int> backward_calls;

 private:
  void gather(const Tensor& mine, Tensor& all) {
    meeting_.parts[rank_] = mine;
    meeting_.barrier.arrive_and_wait();
    std::int64_t at = 0;
    for (const Tensor& part : meeting_.parts) {
      std::memcpy(all.view(at, part.shape()).raw(), part.raw(), static_cast<std::size_t>(part.bytes()));
      at += part.numel();
    }
    meeting_.barrier.arrive_and_wait();
  }
  Meeting& meeting_;
  std::size_t rank_;
};

/// Other ranks that all hold what this one does.
class Copies final : public SharedStatistics {
 public:
  explicit Copies(int ranks) : ranks_(ranks) {}
  int ranks() const override { return ranks_; }
  int gather_forward(const Stream& stream, const Tensor& mine, Tensor& all) override {
    gather(stream, mine, all);
    return forward_calls++;
  }
  void gather_backward(const Stream& stream, int call, const Tensor& mine, Tensor& all) override {
    gather(stream, mine, all);
    backward_calls.push_back(call);
  }
  int forward_calls = 0;
  std::vector<int> backward_calls;

 private:
  void gather(const Stream& stream, const Tensor& mine, Tensor& all) const {
    for (int rank = 0; rank < ranks_; ++rank) {
      Tensor part = all.view(rank * mine.numel(), mine.shape());
      stream.copy(mine, part);
    }
  }
  int ranks_;
};

RunningStats running_stats(std::int64_t channels) { return {normal(Shape{channels}, 21), uniform({channels}, 0.5, 2, 22)}; }

/// Two batch norms in a row, the second of the first's output and a residual. Inputs: x, residual, then weight and bias of each.
Variable two_norms(Context& ctx, Inputs in, RunningStats first, RunningStats second) {
  const Variable y = batch_norm(ctx, in[0], in[2], in[3], Variable(), Activation::relu, 1e-5, 0.1, true, first);
  return batch_norm(ctx, y, in[4], in[5], in[1], Activation::silu, 1e-5, 0.1, true, second);
}

struct Result {
  Tensor y;
  std::vector<Tensor> gradients;   // of the inputs
  RunningStats first, second;
  int forward_calls = 0;
  std::vector<int> backward_calls;
};

/// What comes of these rows, with dy given, on a rank or (statistics null) alone.
Result run(std::vector<Tensor> inputs, const Tensor& dy, SharedStatistics* statistics) {
  Result result;
  result.first = running_stats(inputs[2].dim(0));
  result.second = running_stats(inputs[2].dim(0));
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  ctx.statistics = statistics;
  std::vector<Variable> variables;
  for (const Tensor& input : inputs) variables.push_back(tape.input(input));
  const Variable y = two_norms(ctx, variables, result.first, result.second);
  tape.backward(ctx, y, dy);
  result.y = y.value();
  for (const Variable& variable : variables) result.gradients.push_back(tape.gradient(variable));
  return result;
}

/// The same by `ranks` threads, each with its part of the rows of the first two inputs.
std::vector<Result> run_ranks(int ranks, const std::vector<Tensor>& inputs, const Tensor& dy) {
  Meeting meeting(ranks);
  std::vector<Result> results(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  const std::int64_t rows = dy.dim(0) / ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto part = [&](const Tensor& joined) { return joined.slice(rank * rows, (rank + 1) * rows); };
      std::vector<Tensor> mine = inputs;
      mine[0] = part(inputs[0]);
      mine[1] = part(inputs[1]);
      Threads statistics(meeting, rank);
      Result& result = results[static_cast<std::size_t>(rank)];
      result = run(mine, part(dy), &statistics);
      result.forward_calls = statistics.forward_calls;
      result.backward_calls = statistics.backward_calls;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::vector<Tensor> inputs_of(const Shape& map) {
  const Shape channels{map[-1]};
  return {normal(map, 1), normal(map, 2), normal(channels, 3), normal(channels, 4), normal(channels, 5), normal(channels, 6)};
}

/// A variable for each, with a gradient where its bit of `wanted` is set.
std::vector<Variable> variables_of(Tape& tape, const std::vector<Tensor>& inputs, unsigned wanted) {
  std::vector<Variable> variables;
  for (std::size_t i = 0; i < inputs.size(); ++i) variables.push_back(wanted >> i & 1U ? tape.input(inputs[i]) : Variable(inputs[i]));
  return variables;
}

}  // namespace

TEST_CASE("shared statistics: ranks with parts of a batch give what one process gives with all of it", "[cpu]") {
  const Shape shape{12, 5, 3};
  const std::vector<Tensor> inputs = inputs_of(shape);
  const Tensor dy = normal(shape, 7);
  const Result whole = run(inputs, dy, nullptr);
  // Sums of 60 terms of about one, through two norms.
  const double off = 1e-12;
  for (const int ranks : {1, 2, 3, 4}) {
    const std::vector<Result> results = run_ranks(ranks, inputs, dy);
    const std::int64_t rows = 12 / ranks;
    for (int rank = 0; rank < ranks; ++rank) {
      INFO("rank " << rank << " of " << ranks);
      const Result& result = results[static_cast<std::size_t>(rank)];
      const auto part = [&](const Tensor& joined) { return joined.slice(rank * rows, (rank + 1) * rows); };
      expect_close(result.y, part(whole.y), 0, off);
      expect_close(result.gradients[0], part(whole.gradients[0]), 0, off);
      expect_close(result.gradients[1], part(whole.gradients[1]), 0, off);
      for (const auto& norm : {&Result::first, &Result::second}) {
        const RunningStats &got = result.*norm, &wanted = whole.*norm, &on_first_rank = results[0].*norm;
        expect_close(got.mean, wanted.mean, 0, off);
        expect_close(got.var, wanted.var, 0, off);
        expect_same_bits(got.mean, on_first_rank.mean);
        expect_same_bits(got.var, on_first_rank.var);
      }
      CHECK(result.forward_calls == 2);
      CHECK(result.backward_calls == std::vector<int>{1, 0});
    }
    for (std::size_t i = 2; i < inputs.size(); ++i) {   // parameters: shares of each rank's rows
      Tensor sum = host_zeros({3}, DType::f64);
      for (const Result& result : results) {
        for (std::int64_t c = 0; c < 3; ++c) sum.data<double>()[c] += result.gradients[i].data<double>()[c];
      }
      expect_close(sum, whole.gradients[i], 0, off);
    }
  }
}

TEST_CASE("shared statistics: gradients over the joined batch against differences", "[cpu]") {
  constexpr int kRanks = 3;
  const Shape shape{6, 3};   // two rows on each
  const std::vector<Tensor> inputs = inputs_of(shape);
  const Tensor dy = normal(shape, 7);
  const auto loss = [&](const std::vector<Tensor>& at) {
    double sum = 0;
    std::int64_t i = 0;
    for (const Result& result : run_ranks(kRanks, at, dy)) {
      for (const double v : values_of(result.y)) sum += v * dy.data<double>()[i++];
    }
    return sum;
  };
  const std::vector<Result> results = run_ranks(kRanks, inputs, dy);
  constexpr double kStep = 1e-6;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    for (std::int64_t j = 0; j < inputs[k].numel(); ++j) {
      std::vector<Tensor> moved = inputs;
      moved[k] = host_tensor<double>(inputs[k].shape(), values_of(inputs[k]));
      double& x = moved[k].data<double>()[j];
      x += kStep;
      const double above = loss(moved);
      x -= 2 * kStep;
      const double below = loss(moved);
      double exact = 0;
      if (k < 2) exact = results[static_cast<std::size_t>(j / 6)].gradients[k].data<double>()[j % 6];
      else for (const Result& result : results) exact += result.gradients[k].data<double>()[j];
      INFO("input " << k << ", element " << j);
      expect_close(exact, (above - below) / (2 * kStep), 1e-3, 1e-5);
    }
  }
}

TEST_CASE("shared statistics: gradients, and all subsets of them", "[cpu]") {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
    for (const int ranks : {1, 3}) {
      for (const bool residual : {true, false}) {
        INFO("activation " << static_cast<int>(activation) << ", " << ranks << " ranks, residual " << residual);
        // Ranks with equal rows: the statistics and their derivatives are those of one.
        Copies statistics(ranks);
        const Op op = [&](Context& ctx, Inputs in) {
          ctx.statistics = &statistics;
          return batch_norm(ctx, in[0], in[1], in[2], residual ? in[3] : Variable(), activation, 1e-5, 0.1, true, running_stats(3));
        };
        std::vector<Tensor> inputs = {normal({2, 1, 3, 3}, 1), normal(Shape{3}, 2), normal(Shape{3}, 3)};
        if (residual) inputs.push_back(normal({2, 1, 3, 3}, 4));
        expect_gradients(op, inputs);
        expect_gradient_subsets(op, inputs);
      }
    }
  }
}

TEST_CASE("shared statistics: the sum of two norms has the bits of the two, with one exchange", "[cpu]") {
  const Shape shape{4, 3, 3};
  std::vector<Tensor> inputs;   // x, weight and bias of each
  for (int branch = 0; branch < 2; ++branch) {
    const auto seed = static_cast<std::uint64_t>(10 * branch);
    inputs.insert(inputs.end(), {normal(shape, 1 + seed), normal(Shape{3}, 2 + seed), normal(Shape{3}, 3 + seed)});
  }
  const Tensor dy = normal(shape, 30);
  for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
    for (unsigned wanted = 0; wanted < 64; ++wanted) {
      INFO("activation " << static_cast<int>(activation) << ", wanted " << wanted);
      struct Outcome {
        Tensor y;
        std::vector<Tensor> gradients;
        RunningStats running[2];
        Copies statistics{3};
      };
      const auto run = [&](bool together) {
        Outcome out;
        for (RunningStats& running : out.running) running = running_stats(3);
        Tape tape;
        Context ctx(Stream::cpu(1), &tape, true);
        ctx.statistics = &out.statistics;
        const std::vector<Variable> in = variables_of(tape, inputs, wanted);
        Variable y;
        if (together) {
          y = batch_norm_sum(ctx, {in[0], in[1], in[2], 1e-5, 0.1, out.running[0]}, {in[3], in[4], in[5], 1e-3, 0.2, out.running[1]}, activation, true);
        } else {
          const Variable b = batch_norm(ctx, in[3], in[4], in[5], Variable(), Activation::none, 1e-3, 0.2, true, out.running[1]);
          y = batch_norm(ctx, in[0], in[1], in[2], b, activation, 1e-5, 0.1, true, out.running[0]);
        }
        if (wanted != 0) tape.backward(ctx, y, dy);
        out.y = y.value();
        for (std::size_t i = 0; i < in.size(); ++i) out.gradients.push_back(wanted >> i & 1U ? tape.gradient(in[i]) : Tensor());
        return out;
      };
      const Outcome got = run(true), separate = run(false);
      expect_same_bits(got.y, separate.y);
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        if (wanted >> i & 1U) expect_same_bits(got.gradients[i], separate.gradients[i]);
      }
      for (int branch = 0; branch < 2; ++branch) {
        expect_same_bits(got.running[branch].mean, separate.running[branch].mean);
        expect_same_bits(got.running[branch].var, separate.running[branch].var);
      }
      CHECK(got.statistics.forward_calls == 1);
      CHECK(separate.statistics.forward_calls == 2);
      const bool exchanges = (wanted & 1U) != 0 || (wanted & 8U) != 0;
      CHECK(got.statistics.backward_calls == (exchanges ? std::vector<int>{0} : std::vector<int>{}));
    }
  }
}

TEST_CASE("shared statistics: gradients of the sum of two norms, and all subsets of them", "[cpu]") {
  for (const bool shared : {true, false}) {
    for (const bool batch : {true, false}) {
      INFO("shared " << shared << ", batch statistics " << batch);
      Copies statistics(2);
      const Op op = [&](Context& ctx, Inputs in) {
        if (shared) ctx.statistics = &statistics;
        return batch_norm_sum(ctx, {in[0], in[1], in[2], 1e-5, 0.1, running_stats(3)}, {in[3], in[4], in[5], 1e-5, 0.1, running_stats(3)}, Activation::silu, batch);
      };
      const std::vector<Tensor> inputs = {normal({2, 1, 3, 3}, 1), normal(Shape{3}, 2), normal(Shape{3}, 3), normal({2, 1, 3, 3}, 4), normal(Shape{3}, 5), normal(Shape{3}, 6)};
      expect_gradients(op, inputs);
      expect_gradient_subsets(op, inputs);
    }
  }
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable map(normal({4, 3}, 1)), other(normal({5, 3}, 1)), channel(normal(Shape{3}, 2));
  expect_throws<InvalidArgument>([&] {
    batch_norm_sum(ctx, {map, channel, channel, 1e-5, 0.1, running_stats(3)}, {other, channel, channel, 1e-5, 0.1, running_stats(3)}, Activation::none, true);
  }, "batch_norm_sum: maps of one shape, got (4, 3) and (5, 3)");
}

TEST_CASE("shared statistics: backward exchanges where x wants a gradient, and nowhere else", "[cpu]") {
  const Shape shape{4, 3};
  const std::vector<Tensor> inputs = {normal(shape, 1), normal(Shape{3}, 2), normal(Shape{3}, 3), normal(shape, 4)};
  for (unsigned wanted = 1; wanted < 16; ++wanted) {
    INFO("wanted " << wanted);
    Copies statistics(2);
    Tape tape;
    Context ctx(Stream::cpu(1), &tape, true);
    ctx.statistics = &statistics;
    const std::vector<Variable> in = variables_of(tape, inputs, wanted);
    const Variable y = batch_norm(ctx, in[0], in[1], in[2], in[3], Activation::silu, 1e-5, 0.1, true, running_stats(3));
    tape.backward(ctx, y, normal(shape, 5));
    CHECK(statistics.forward_calls == 1);
    CHECK(statistics.backward_calls.size() == (wanted & 1U));
  }
}

TEST_CASE("shared statistics: given statistics are not exchanged, those of a context without a tape are", "[cpu]") {
  Copies statistics(2);
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  ctx.statistics = &statistics;
  const std::vector<Variable> in = variables_of(tape, {normal({4, 3}, 1), normal(Shape{3}, 2), normal(Shape{3}, 3)}, 7);
  const Variable y = batch_norm(ctx, in[0], in[1], in[2], Variable(), Activation::none, 1e-5, 0.1, false, running_stats(3));
  tape.backward(ctx, y, normal({4, 3}, 5));
  CHECK(statistics.forward_calls == 0);
  CHECK(statistics.backward_calls.empty());
  Context constant = ctx.without_tape();
  batch_norm(constant, in[0], in[1], in[2], Variable(), Activation::none, 1e-5, 0.1, true, running_stats(3));
  CHECK(statistics.forward_calls == 1);
}

TEST_CASE("shared statistics: a planning stream is told of every exchange", "[cpu]") {
  const Stream stream = Stream::planning(Device::cpu());
  Copies statistics(2);
  Tape tape;
  Context ctx(stream, &tape, true);
  ctx.statistics = &statistics;
  const auto empty = [&](const Shape& shape) { return stream.empty(shape, DType::f32); };
  std::vector<Variable> in;
  for (const Shape& shape : {Shape{4, 3}, Shape{4, 3}, Shape{3}, Shape{3}, Shape{3}, Shape{3}}) in.push_back(tape.input(empty(shape)));
  const Variable y = two_norms(ctx, in, {empty({3}), empty({3})}, {empty({3}), empty({3})});
  tape.backward(ctx, y, empty({4, 3}));
  CHECK(statistics.forward_calls == 2);
  CHECK(statistics.backward_calls == std::vector<int>{1, 0});
}
