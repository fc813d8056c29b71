#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace detr {

/// Failures that a run is told to have, to rehearse them: the environment variable DETRTRAIN_FAULT, in every build.
///
///   'kind:key=value,...;kind:...'      such as 'throw:rank=1,step=5,phase=backward;sleep:ms=50,phase=load'
///
/// Every kind takes rank (a number, or * for all: the default) and, but for allocfail and manifest, step (5, 5-9, 5-, *: the default).
/// The first five take phase, one of kPhases, or * for all (the default). Those of the start (rendezvous to start)
/// come before the first step and match step=* alone.
///
///   throw                      an Error (exit 1)                     exit:code=      ends the process without a word
///   signal:sig=                SEGV, ABRT, FPE, BUS, ILL, KILL, STOP, TERM, INT or a number, to this process
///   sleep:ms=                  stops the thread that long            hang            for good
///   drop:param=REGEX           parameters that get no contribution: whose name the expression is found in,
///   drop:p=,seed=              or a share of them, drawn for each rank, step and name (seed: 0)
///   constloss                  the loss is a constant
///   set:param=,index=,value=   a value (nan, inf, -inf, 1e38) in a gradient before the reduction
///   flip:buffer=,index=,bit=   a bit (0 to 31) of weights, moments or ema
///   swap:a=,b=                 two slots of the plan in swapped order
///   short:slot=                half the length of a slot, which the plan's own check finds
///   nobatch                    the data end
///   allocfail:n=               the n-th allocation of host memory fails
///   manifest:field=            the value of a field differs
///
/// A value holds no comma and no semicolon. What is asked for does not happen here but for the first five: the owner of the thing asks.
/// All calls are for any thread and cost nothing where nothing is asked for.
class Faults {
 public:
  static constexpr std::array<std::string_view, 14> kPhases = {"rendezvous", "plan", "manifest", "connect", "start", "load", "forward", "backward", "reduce", "update",
                                                               "compare", "save", "eval", "end"};

  /// None.
  Faults() = default;
  /// Those of `text` that concern this rank. Throws ConfigError naming the first part that is malformed, unknown, missing or out of range.
  Faults(const std::string& text, int rank, int size);
  /// Of DETRTRAIN_FAULT.
  static Faults from_environment(int rank, int size);

  /// The text in full, whomever it concerns, for the line that announces it; empty if there is none.
  const std::string& text() const { return text_; }

  /// The thread comes to a phase of a step (-1: before the first): throws, exits, dies, sleeps or hangs where that is asked for.
  void at(std::string_view phase, std::int64_t step) const;

  /// Whether a parameter's contribution is left out at this step; null where none is.
  using Predicate = std::function<bool(const std::string& parameter)>;
  Predicate drop(std::int64_t step) const;
  bool constant_loss(std::int64_t step) const;
  bool no_batch(std::int64_t step) const;

  struct SetValue {
    std::string parameter;
    std::int64_t index = 0;
    float value = 0;
  };
  std::vector<SetValue> set_values(std::int64_t step) const;

  struct FlipBit {
    std::string buffer;   ///< weights, moments or ema
    std::int64_t index = 0;
    int bit = 0;
  };
  std::vector<FlipBit> flip_bits(std::int64_t step) const;

  struct Swap {
    int a = 0, b = 0;
  };
  std::optional<Swap> swapped_slots(std::int64_t step) const;
  std::optional<int> short_slot(std::int64_t step) const;

  /// Which allocation fails, from 1 on; 0: none.
  std::int64_t failing_allocation() const;
  /// Fields of the manifest to change.
  std::vector<std::string> manifest_fields() const;

  /// What is asked for must be there: otherwise it would never happen, and nobody would know. Each throws ConfigError naming the fault and what there is.
  /// Of set and drop: names of the parameters and how many values each has.
  void expect_parameters(const std::vector<std::pair<std::string, std::int64_t>>& parameters) const;
  /// Of manifest.
  void expect_fields(const std::vector<std::string>& names) const;
  /// Of swap and short: buckets of gradients.
  void expect_slots(int count) const;

 private:
  struct Clause;
  template <class Use>
  void each(std::string_view kind, std::int64_t step, const Use& use) const;

  std::string text_;
  std::vector<std::shared_ptr<const Clause>> clauses_;
};

}  // namespace detr
