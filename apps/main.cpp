#include <malloc.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <map>
#include <new>

#include "apps/cli.h"
#include "apps/rank.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::apps {
namespace {

/// `_` and `-` are the same inside long flag names; values stay as they are.
std::vector<std::string> normalised(int argc, char** argv) {
  std::vector<std::string> arguments;
  bool only_values = false;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    if (argument == "--") only_values = true;
    if (!only_values && argument.starts_with("--")) {
      const std::size_t end = std::min(argument.find('='), argument.size());
      std::replace(argument.begin(), argument.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
    }
    arguments.push_back(std::move(argument));
  }
  return arguments;
}

void add_common(CLI::App& app, CommonOptions& common) {
  app.add_option("-c,--config", common.config, "configuration: a file, or r18 r34 r50m r50 r101 tiny");
  app.add_option("-u,--update", common.updates, "KEY=VALUE of the configuration; repeatable")->take_all()->allow_extra_args(false);
  app.add_option("updates", common.bare_updates, "bare KEY=VALUE at the end of the line");
  app.add_option("-d,--device", common.device, "cpu, cuda, cuda:0; default: a GPU if there is one");
  app.add_option("--seed", common.seed, "seed of all random numbers")->check(whole_number(0))->each([&common](const std::string&) { common.seed_given = true; });
  app.add_option("--threads", common.threads, "compute threads; default: all CPUs this process may use")->check(whole_number(1, 4096));
  app.add_flag("--json", common.json, "one JSON object on stdout, nothing else");
  app.add_flag("-q,--quiet", common.quiet, "no progress, no notes");
  app.add_flag("-v,--verbose", common.verbose, "more detail");
  app.add_option("--log-style", common.log_style, "bar, lines or classic; default: bar on a terminal")->check(CLI::IsMember({"auto", "bar", "lines", "classic"}));
}

/// Of an option that takes one value (or a switch) and was given more than once: its name; else empty.
std::string given_twice(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_expected_max() <= 1 && option->get_multi_option_policy() != CLI::MultiOptionPolicy::TakeAll && option->count() > 1) return option->get_name();
  }
  return {};
}

/// What is wrong with the arguments of a verb, in our words: CLI11's own name no near flags.
std::string usage_error(const CLI::App& verb, const CLI::ParseError& error) {
  const std::string twice = given_twice(verb);
  if (!twice.empty()) return twice + " is given more than once; give it once";
  const std::vector<std::string> rest = verb.remaining();
  if (!dynamic_cast<const CLI::ExtrasError*>(&error) || rest.empty()) return error.what();
  if (!rest[0].starts_with('-')) return concat("unexpected argument '", rest[0], "'");
  std::vector<std::string> names;
  for (const CLI::Option* option : verb.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  const std::string unknown = rest[0].substr(0, rest[0].find('='));
  return concat("unknown flag ", unknown, "; did you mean ", nearest_word(unknown, names), "?");
}

/// What is wrong with a line that does not start with one of `verbs`.
std::string missing_verb(const std::vector<std::string>& arguments, const std::vector<std::string>& verbs) {
  const auto word = std::find_if(arguments.begin(), arguments.end(), [](const std::string& a) { return !a.starts_with('-'); });
  if (word == arguments.end()) return "a command is needed: " + CLI::detail::join(verbs, ", ");
  if (std::find(verbs.begin(), verbs.end(), *word) != verbs.end()) return concat("flags come after the command: detrtrain ", *word, " ", arguments[0], " ...");
  return concat("unknown command '", *word, "'; did you mean ", nearest_word(*word, verbs), "?");
}

std::string dump(const nlohmann::json& object) { return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace); }   // names from data may be no UTF-8

int report(const std::string& verb, bool json, int code, const std::string& text) {
  const std::string line = escaped(text);
  fail_rank(code, line);
  std::cerr << (has_launcher() ? "" : "detrtrain: error: ") << line << std::endl;   // a launcher's last line says it in full
  if (json && !has_launcher()) std::cout << error_json(verb, code, line) << std::endl;
  return code;
}

/// A standard stream that is closed stays useless: without this, the next file that is opened would get its number, and messages
/// would be written into that file.
void hold_standard_descriptors() {
  for (const int descriptor : {0, 1, 2}) {
    if (::fcntl(descriptor, F_GETFD) == -1 && ::open("/dev/null", descriptor == 0 ? O_WRONLY : O_RDONLY) != descriptor) std::_Exit(kBug);
  }
}

int run(int argc, char** argv) {
  hold_standard_descriptors();
  if (::getuid() != ::geteuid() || ::getgid() != ::getegid()) {
    std::cerr << "detrtrain: error: it does not run with the rights of another user (set-uid or set-gid): chmod u-s,g-s" << std::endl;
    return kUsage;
  }
  std::signal(SIGPIPE, SIG_IGN);
  CLI::App app("Trains, evaluates and runs detection transformers (RT-DETRv2).", "detrtrain");
  app.set_version_flag("--version", build_text);
  app.require_subcommand(1);
  CommonOptions common;
  struct Entry {
    const char* name;
    const char* help;
    Verb (*add)(CLI::App&, const CommonOptions&);
  };
  static constexpr Entry kVerbs[] = {
      {"train", "train, evaluate, write everything", add_train},
      {"eval", "COCO AP of weights on a data set, or of a results file", add_eval},
      {"predict", "detections of pictures: COCO json, drawings", add_predict},
      {"synth", "write a small synthetic data set", add_synth},
      {"check-data", "find what is wrong with a data set", add_check_data},
      {"info", "describe a model, checkpoint, configuration, device or run", add_info},
      {"bench", "measure this machine", add_bench},
      {"selftest", "compare this machine with recorded numbers", add_selftest},
  };
  std::map<std::string, Verb> actions;
  for (const Entry& entry : kVerbs) {
    CLI::App* sub = app.add_subcommand(entry.name, entry.help);
    add_common(*sub, common);
    actions[entry.name] = entry.add(*sub, common);
  }
  const std::vector<std::string> arguments = normalised(argc, argv);
  const bool json = std::find(arguments.begin(), arguments.end(), "--json") != arguments.end();   // known even where the rest cannot be parsed
  std::string verb;
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));   // CLI11 takes them last first
    const CLI::App* parsed = app.get_subcommands().front();
    verb = parsed->get_name();
    if (!given_twice(*parsed).empty()) throw CLI::ArgumentMismatch(given_twice(*parsed));   // CLI11 lets a switch repeat
  } catch (const CLI::CallForHelp&) {
    const auto parsed = app.get_subcommands();
    std::cout << (parsed.empty() ? app.help() : parsed.front()->help());
    return kDone;
  } catch (const CLI::CallForVersion&) {
    std::cout << build_text() << std::endl;
    return kDone;
  } catch (const CLI::ParseError& error) {
    const auto parsed = app.get_subcommands();
    std::vector<std::string> names;
    for (const Entry& entry : kVerbs) names.push_back(entry.name);
    if (!parsed.empty()) verb = parsed.front()->get_name();
    const std::string text = parsed.empty() || arguments[0].starts_with('-') ? missing_verb(arguments, names) : usage_error(*parsed.front(), error);
    return report(verb, json, kUsage, text + " (detrtrain " + (verb.empty() ? "" : verb + " ") + "--help)");
  }
  try {
    const Outcome outcome = actions.at(verb)();
    const std::string error = escaped(outcome.error);
    if (!error.empty() && prints_results()) std::cerr << "detrtrain: error: " << error << std::endl;
    if (common.json && !outcome.reported && prints_results()) {
      nlohmann::json object = {{"command", verb}, {"version", version_text()}, {"exit", outcome.code}, {"error", nullptr}};
      if (!error.empty()) object["error"] = error;
      object.update(outcome.json);
      print_line(dump(object));
    }
    return leave_job(outcome.code);
  } catch (const std::exception& error) {
    return report(verb, json, code_of(error), text_of(error));
  }
}

}  // namespace
}  // namespace detr::apps

int main(int argc, char** argv) {
  // Matrix products take and give back buffers of about a megabyte; without this glibc returns them to the system each time.
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  return detr::apps::run(argc, argv);
}
