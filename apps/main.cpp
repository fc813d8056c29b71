#include <malloc.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <map>
#include <new>

#include "apps/cli.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::apps {
namespace {

/// The one table from error type to exit code.
int code_of(const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error)) return kUsage;
  if (dynamic_cast<const DataError*>(&error)) return kData;
  if (dynamic_cast<const OutOfMemory*>(&error) || dynamic_cast<const std::bad_alloc*>(&error)) return kMemory;
  if (dynamic_cast<const Diverged*>(&error)) return kDiverged;
  if (dynamic_cast<const CommError*>(&error)) return kCommunication;
  if (dynamic_cast<const StorageError*>(&error)) return kStorage;
  if (dynamic_cast<const DeviceError*>(&error)) return kDevice;
  if (dynamic_cast<const CheckFailed*>(&error)) return kCheckFailed;
  return kBug;
}

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
  app.add_option("updates", common.updates, "bare KEY=VALUE at the end of the line");
  app.add_option("-d,--device", common.device, "cpu, cuda, cuda:0; default: a GPU if there is one");
  app.add_option("--seed", common.seed, "seed of all random numbers")->each([&common](const std::string&) { common.seed_given = true; });
  app.add_option("--threads", common.threads, "compute threads; default: all CPUs this process may use")->check(CLI::Range(1, 4096));
  app.add_flag("--json", common.json, "one JSON object on stdout, nothing else");
  app.add_flag("-q,--quiet", common.quiet, "no progress, no notes");
  app.add_flag("-v,--verbose", common.verbose, "more detail");
  app.add_option("--log-style", common.log_style, "bar, lines or classic; default: bar on a terminal")->check(CLI::IsMember({"auto", "bar", "lines", "classic"}));
}

/// The flag of the subcommand nearest to an unknown argument.
std::string nearest_flag(const CLI::App& app, const std::string& unknown) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return nearest_word(unknown.substr(0, unknown.find('=')), names);
}

int report(const std::string& verb, bool json, int code, const std::string& text) {
  const std::string line = escaped(text);
  std::cerr << "detrtrain: error: " << line << std::endl;
  if (json) std::cout << nlohmann::json{{"command", verb}, {"version", version_text()}, {"exit", code}, {"error", line}}.dump() << std::endl;
  return code;
}

int run(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  CLI::App app("Trains, evaluates and runs detection transformers (RT-DETRv2).", "detrtrain");
  app.set_version_flag("--version", version_text);
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
      {"selftest", "compare this machine with recorded numbers", add_selftest},
  };
  std::map<std::string, Verb> actions;
  for (const Entry& entry : kVerbs) {
    CLI::App* sub = app.add_subcommand(entry.name, entry.help);
    add_common(*sub, common);
    actions[entry.name] = entry.add(*sub, common);
  }
  std::vector<std::string> arguments = normalised(argc, argv);
  std::reverse(arguments.begin(), arguments.end());   // CLI11 takes them last first
  std::string verb;
  try {
    app.parse(arguments);
    verb = app.get_subcommands().front()->get_name();
  } catch (const CLI::CallForHelp&) {
    const auto parsed = app.get_subcommands();
    std::cout << (parsed.empty() ? app.help() : parsed.front()->help());
    return kDone;
  } catch (const CLI::CallForVersion&) {
    std::cout << version_text() << std::endl;
    return kDone;
  } catch (const CLI::ParseError& error) {
    std::string text = error.what();
    const auto parsed = app.get_subcommands();
    if (!parsed.empty()) verb = parsed.front()->get_name();
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (!parsed.empty() && argument.starts_with("--") && text.find(argument.substr(0, argument.find('='))) != std::string::npos) {
        const std::string nearest = nearest_flag(*parsed.front(), argument);
        if (!nearest.empty() && nearest != argument) text += "; did you mean " + nearest + "?";
        break;
      }
    }
    if (parsed.empty() && argc > 1 && argv[1][0] != '-') {
      std::vector<std::string> names;
      for (const Entry& entry : kVerbs) names.push_back(entry.name);
      text = concat("unknown command '", argv[1], "'; did you mean ", nearest_word(argv[1], names), "?");
    }
    return report(verb, common.json, kUsage, text + " (detrtrain " + (verb.empty() ? "" : verb + " ") + "--help)");
  }
  try {
    Outcome outcome = actions.at(verb)();
    if (common.json) {
      nlohmann::json object = {{"command", verb}, {"version", version_text()}, {"exit", outcome.code}, {"error", nullptr}};
      object.update(outcome.json);
      print_line(object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    }
    return outcome.code;
  } catch (const std::exception& error) {
    return report(verb, common.json, code_of(error), dynamic_cast<const std::bad_alloc*>(&error) ? "out of host memory" : error.what());
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
