#include "runtime/faults.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <map>
#include <regex>
#include <thread>

#include "runtime/error.h"
#include "runtime/random.h"
#include "runtime/text.h"

namespace detr {

/// One part between semicolons, checked. What a kind has no key for keeps its default.
struct Faults::Clause {
  std::string text;
  std::string kind;
  std::int64_t first_step = -1, last_step = std::numeric_limits<std::int64_t>::max();   // -1: also before the first step
  std::string phase;                                                                    // empty: every one
  int rank = 0;                                                                         // whose it is
  std::int64_t number = 0, index = 0;   // code, sig, ms, n, slot, a, bit; index, b
  std::string name;                     // parameter, buffer, field
  double value = 0;                     // value, p
  std::uint64_t seed = 0;
  std::optional<std::regex> expression;
};

namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

/// The keys of each kind besides rank.
const std::map<std::string, std::vector<std::string>>& kinds() {
  static const std::map<std::string, std::vector<std::string>> table = {
      {"throw", {"step", "phase"}},          {"exit", {"step", "phase", "code"}},  {"signal", {"step", "phase", "sig"}},
      {"sleep", {"step", "phase", "ms"}},    {"hang", {"step", "phase"}},          {"drop", {"step", "param", "p", "seed"}},
      {"constloss", {"step"}},               {"set", {"step", "param", "index", "value"}},
      {"flip", {"step", "buffer", "index", "bit"}},                                {"swap", {"step", "a", "b"}},
      {"short", {"step", "slot"}},           {"nobatch", {"step"}},                {"allocfail", {"n"}},
      {"manifest", {"field"}},
  };
  return table;
}

const std::map<std::string, int>& signal_numbers() {
  static const std::map<std::string, int> table = {{"SEGV", SIGSEGV}, {"ABRT", SIGABRT}, {"FPE", SIGFPE}, {"BUS", SIGBUS},   {"ILL", SIGILL},
                                                   {"KILL", SIGKILL}, {"STOP", SIGSTOP}, {"TERM", SIGTERM}, {"INT", SIGINT}};
  return table;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

/// One part of the text, while it is read.
class Part {
 public:
  explicit Part(const std::string& text) : text_(text) {
    const std::size_t colon = std::min(text.find(':'), text.size());
    kind_ = text.substr(0, colon);
    const auto known = kinds().find(kind_);
    std::vector<std::string> words;
    if (known == kinds().end()) {
      for (const auto& [word, keys] : kinds()) words.push_back(word);
      fail("there is no fault '", kind_, "'; did you mean '", nearest_word(kind_, words), "'?");
    }
    words = known->second;
    words.emplace_back("rank");
    if (colon == text.size()) return;
    for (const std::string& pair : split(text.substr(colon + 1), ',')) {
      const std::size_t equals = pair.find('=');
      if (equals == std::string::npos || equals == 0 || equals + 1 == pair.size()) fail("wanted key=value, got '", pair, "'");
      const std::string key = pair.substr(0, equals);
      if (std::find(words.begin(), words.end(), key) == words.end()) fail(kind_, " has no key '", key, "'; did you mean '", nearest_word(key, words), "'?");
      if (!values_.emplace(key, pair.substr(equals + 1)).second) fail("'", key, "' is given twice");
    }
  }

  const std::string& kind() const { return kind_; }
  bool has(const std::string& key) const { return values_.contains(key); }
  const std::string& value(const std::string& key) const {
    if (!has(key)) fail(kind_, " needs ", key, "=");
    return values_.at(key);
  }
  std::int64_t number(const std::string& key, std::int64_t lowest, std::int64_t highest) const { return parse(key, value(key), lowest, highest); }
  std::int64_t parse(const std::string& key, const std::string& text, std::int64_t lowest, std::int64_t highest) const {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || number < lowest || number > highest) {
      fail(key, "=", text, ": wanted a whole number ", highest == kMost ? concat("of at least ", lowest) : concat("from ", lowest, " to ", highest));
    }
    return number;
  }
  double real(const std::string& key) const {
    const std::string& text = value(key);
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) fail(key, "=", text, ": wanted a number");
    return number;
  }
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    throw ConfigError("DETRTRAIN_FAULT, '", escape_control(text_), "': ", escape_control(concat(parts...)));
  }

 private:
  std::string text_, kind_;
  std::map<std::string, std::string> values_;
};

/// The steps of 5, 5-9, 5- or *.
std::pair<std::int64_t, std::int64_t> steps_of(const Part& part) {
  if (!part.has("step") || part.value("step") == "*") return {-1, kMost};
  const std::string& text = part.value("step");
  const std::size_t dash = text.find('-');
  const std::int64_t first = part.parse("step", text.substr(0, dash), 0, kMost);
  if (dash == std::string::npos) return {first, first};
  return {first, dash + 1 == text.size() ? kMost : part.parse("step", text.substr(dash + 1), first, kMost)};
}

std::string phase_of(const Part& part) {
  if (!part.has("phase") || part.value("phase") == "*") return {};
  const std::string& phase = part.value("phase");
  const std::vector<std::string> phases(Faults::kPhases.begin(), Faults::kPhases.end());
  if (std::find(phases.begin(), phases.end(), phase) == phases.end()) part.fail("there is no phase '", phase, "'; did you mean '", nearest_word(phase, phases), "'?");
  if (std::find(phases.begin(), phases.end(), phase) <= std::find(phases.begin(), phases.end(), "start")) {
    if (part.has("step") && part.value("step") != "*") part.fail("phase ", phase, " comes before the first step");
  }
  return phase;
}

int signal_of(const Part& part) {
  std::string word = part.value("sig");
  if (word.starts_with("SIG")) word.erase(0, 3);
  const auto known = signal_numbers().find(word);
  return known != signal_numbers().end() ? known->second : static_cast<int>(part.number("sig", 1, SIGRTMAX));
}

template <class... Parts>
[[noreturn]] void hits_nothing(const std::string& clause, const Parts&... parts) {
  throw ConfigError("DETRTRAIN_FAULT, '", escape_control(clause), "': ", escape_control(concat(parts...)));
}

std::uint64_t hash_of(const std::string& text) {   // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

}  // namespace

Faults::Faults(const std::string& text, int rank, int size) : text_(text) {
  if (text.empty()) return;
  for (const std::string& one : split(text, ';')) {
    const Part part(one);
    const auto made = std::make_shared<Clause>();
    Clause& clause = *made;
    clause.text = one;
    clause.kind = part.kind();
    clause.rank = rank;
    std::tie(clause.first_step, clause.last_step) = steps_of(part);
    clause.phase = phase_of(part);
    if (clause.kind == "exit") clause.number = part.number("code", 0, 255);
    if (clause.kind == "signal") clause.number = signal_of(part);
    if (clause.kind == "sleep") clause.number = part.number("ms", 0, 3600 * 1000);
    if (clause.kind == "drop") {
      if (part.has("param") == part.has("p")) part.fail("drop needs either param= or p=");
      if (part.has("param") && part.has("seed")) part.fail("seed belongs to p");
      if (part.has("p") && !((clause.value = part.real("p")) >= 0 && clause.value <= 1)) part.fail("p=", part.value("p"), ": wanted a number from 0 to 1");
      if (part.has("seed")) clause.seed = static_cast<std::uint64_t>(part.number("seed", 0, kMost));
      try {
        if (part.has("param")) clause.expression.emplace(part.value("param"));
      } catch (const std::regex_error& error) {
        part.fail("param=", part.value("param"), " is no regular expression: ", error.what());
      }
    }
    if (clause.kind == "set") {
      clause.name = part.value("param");
      clause.index = part.number("index", 0, kMost);
      clause.value = part.real("value");
      if (std::isfinite(clause.value) && std::abs(clause.value) > std::numeric_limits<float>::max()) part.fail("value=", part.value("value"), ": beyond the numbers of f32");
    }
    if (clause.kind == "flip") {
      clause.name = part.value("buffer");
      if (clause.name != "weights" && clause.name != "moments" && clause.name != "ema") part.fail("buffer=", clause.name, ": wanted weights, moments or ema");
      clause.index = part.number("index", 0, kMost);
      clause.number = part.number("bit", 0, 31);
    }
    if (clause.kind == "swap") {
      clause.number = part.number("a", 0, std::numeric_limits<int>::max());
      clause.index = part.number("b", 0, std::numeric_limits<int>::max());
      if (clause.number == clause.index) part.fail("a and b are the same slot");
    }
    if (clause.kind == "short") clause.number = part.number("slot", 0, std::numeric_limits<int>::max());
    if (clause.kind == "allocfail") clause.number = part.number("n", 1, kMost);
    if (clause.kind == "manifest") clause.name = part.value("field");
    const bool for_all = !part.has("rank") || part.value("rank") == "*";
    if (for_all || part.number("rank", 0, size - 1) == rank) clauses_.push_back(made);
  }
}

Faults Faults::from_environment(int rank, int size) {
  const char* text = std::getenv("DETRTRAIN_FAULT");
  return text ? Faults(text, rank, size) : Faults();
}

template <class Use>
void Faults::each(std::string_view kind, std::int64_t step, const Use& use) const {
  for (const auto& clause : clauses_) {
    if (clause->kind == kind && step >= clause->first_step && step <= clause->last_step) use(*clause);
  }
}

void Faults::at(std::string_view phase, std::int64_t step) const {
  if (clauses_.empty()) return;
  DETR_CHECK(std::find(kPhases.begin(), kPhases.end(), phase) != kPhases.end(), "faults: there is no phase '", std::string(phase), "'");
  for (const auto& clause : clauses_) {
    if (step < clause->first_step || step > clause->last_step || (!clause->phase.empty() && clause->phase != phase)) continue;
    if (clause->kind == "sleep") std::this_thread::sleep_for(std::chrono::milliseconds(clause->number));
    if (clause->kind == "hang") {
      while (true) ::pause();
    }
    if (clause->kind == "exit") ::_exit(static_cast<int>(clause->number));
    if (clause->kind == "signal") static_cast<void>(std::raise(static_cast<int>(clause->number)));
    if (clause->kind == "throw") throw Error("DETRTRAIN_FAULT: an error that was asked for (step ", step, ", ", std::string(phase), ")");
  }
}

Faults::Predicate Faults::drop(std::int64_t step) const {
  std::vector<std::shared_ptr<const Clause>> active;
  for (const auto& clause : clauses_) {
    if (clause->kind == "drop" && step >= clause->first_step && step <= clause->last_step) active.push_back(clause);
  }
  if (active.empty()) return nullptr;
  return [active, step](const std::string& parameter) {
    return std::any_of(active.begin(), active.end(), [&](const auto& clause) {
      if (clause->expression) return std::regex_search(parameter, *clause->expression);
      const RandomKey key = RandomKey(clause->seed).fold(static_cast<std::uint64_t>(clause->rank)).fold(static_cast<std::uint64_t>(step)).fold(hash_of(parameter));
      return uniform(key, 0) < clause->value;
    });
  };
}

bool Faults::constant_loss(std::int64_t step) const {
  bool found = false;
  each("constloss", step, [&](const Clause&) { found = true; });
  return found;
}

bool Faults::no_batch(std::int64_t step) const {
  bool found = false;
  each("nobatch", step, [&](const Clause&) { found = true; });
  return found;
}

std::vector<Faults::SetValue> Faults::set_values(std::int64_t step) const {
  std::vector<SetValue> found;
  each("set", step, [&](const Clause& c) { found.push_back({c.name, c.index, static_cast<float>(c.value)}); });
  return found;
}

std::vector<Faults::FlipBit> Faults::flip_bits(std::int64_t step) const {
  std::vector<FlipBit> found;
  each("flip", step, [&](const Clause& c) { found.push_back({c.name, c.index, static_cast<int>(c.number)}); });
  return found;
}

std::optional<Faults::Swap> Faults::swapped_slots(std::int64_t step) const {
  std::optional<Swap> found;
  each("swap", step, [&](const Clause& c) { found = {static_cast<int>(c.number), static_cast<int>(c.index)}; });
  return found;
}

std::optional<int> Faults::short_slot(std::int64_t step) const {
  std::optional<int> found;
  each("short", step, [&](const Clause& c) { found = static_cast<int>(c.number); });
  return found;
}

std::int64_t Faults::failing_allocation() const {
  std::int64_t found = 0;
  each("allocfail", 0, [&](const Clause& c) { found = c.number; });
  return found;
}

std::vector<std::string> Faults::manifest_fields() const {
  std::vector<std::string> found;
  each("manifest", 0, [&](const Clause& c) { found.push_back(c.name); });
  return found;
}

void Faults::expect_parameters(const std::vector<std::pair<std::string, std::int64_t>>& parameters) const {
  std::vector<std::string> names;
  for (const auto& [name, size] : parameters) names.push_back(name);
  for (const auto& clause : clauses_) {
    if (clause->kind == "set") {
      const auto found = std::find_if(parameters.begin(), parameters.end(), [&](const auto& parameter) { return parameter.first == clause->name; });
      if (found == parameters.end()) hits_nothing(clause->text, "there is no trainable parameter '", clause->name, "'; did you mean '", nearest_word(clause->name, names), "'?");
      if (clause->index >= found->second) hits_nothing(clause->text, "the parameter has ", found->second, " values, 0 to ", found->second - 1);
    }
    if (clause->kind != "drop" || !clause->expression) continue;
    if (std::none_of(names.begin(), names.end(), [&](const std::string& name) { return std::regex_search(name, *clause->expression); })) {
      hits_nothing(clause->text, "the expression is found in the name of no trainable parameter");
    }
  }
}

void Faults::expect_fields(const std::vector<std::string>& names) const {
  for (const auto& clause : clauses_) {
    if (clause->kind != "manifest" || std::find(names.begin(), names.end(), clause->name) != names.end()) continue;
    if (names.empty()) hits_nothing(clause->text, "one rank has nobody to compare a manifest with");
    hits_nothing(clause->text, "the manifest has no field '", clause->name, "'; did you mean '", nearest_word(clause->name, names), "'?");
  }
}

void Faults::expect_slots(int count) const {
  for (const auto& clause : clauses_) {
    const bool swaps = clause->kind == "swap";
    if ((swaps || clause->kind == "short") && (clause->number >= count || (swaps && clause->index >= count))) {
      hits_nothing(clause->text, "there ", count == 1 ? "is one slot, 0" : concat("are ", count, " slots, 0 to ", count - 1), ", one for each bucket of gradients");
    }
  }
}

}  // namespace detr
