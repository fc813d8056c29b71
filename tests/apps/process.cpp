#include "tests/apps/process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <sstream>
#include <thread>

namespace detr::test {
namespace {

constexpr auto kPatience = std::chrono::minutes(2);

std::string shown(const std::vector<std::string>& arguments) {
  std::string text = "detrtrain";
  for (const std::string& argument : arguments) text += " " + argument;
  return text;
}

}  // namespace

nlohmann::json ProcessResult::json() const {
  INFO("stdout: " << out << "\nstderr: " << err);
  REQUIRE(out.size() > 1);
  CHECK(out.find('\n') == out.size() - 1);
  const nlohmann::json object = nlohmann::json::parse(out, nullptr, false);
  REQUIRE(object.is_object());
  for (const char* key : {"command", "version", "exit", "error"}) CHECK(object.contains(key));
  CHECK(object.value("exit", -1) == code);
  return object;
}

std::vector<std::string> ProcessResult::errors() const {
  std::vector<std::string> errors;
  std::istringstream lines(err);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("detrtrain: error: ")) errors.push_back(line);
  }
  return errors;
}

std::string ProcessResult::last_line() const {
  std::istringstream lines(err);
  std::string last;
  for (std::string line; std::getline(lines, line);) last = line;
  return last;
}

Detrtrain::Detrtrain(const std::vector<std::string>& arguments, Streams streams, const Setting& setting) {
  std::vector<std::string> words = {setting.program.empty() ? DETRTRAIN_BINARY : setting.program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string out = streams == Streams::full ? "/dev/full" : (folder_ / "out").string();
  const std::string err = streams == Streams::full ? "/dev/full" : (folder_ / "err").string();
  pid_ = ::fork();
  REQUIRE(pid_ >= 0);
  if (pid_ == 0) {
    for (const auto& [descriptor, file] : {std::pair(1, &out), std::pair(2, &err)}) {
      ::close(descriptor);
      if (streams != Streams::closed && ::open(file->c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644) != descriptor) ::_exit(127);
    }
    if (setting.error_descriptor >= 0) ::dup2(setting.error_descriptor, 2);
    ::setenv("CUDA_VISIBLE_DEVICES", "", 1);   // a GPU that is there would be the default; these tests speak of the CPU
    for (const auto& [name, value] : setting.variables) ::setenv(name.c_str(), value.c_str(), 1);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
}

Detrtrain::~Detrtrain() {
  if (!running()) return;
  send(SIGKILL);
  ::waitpid(pid_, &status_, 0);
}

void Detrtrain::send(int signal) const {
  if (pid_ > 0) ::kill(pid_, signal);
}

bool Detrtrain::running() {
  if (pid_ > 0 && ::waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
  return pid_ > 0;
}

void Detrtrain::wait_until(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    INFO(err());
    REQUIRE(running());
    REQUIRE(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

ProcessResult Detrtrain::wait() {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (running()) {
    INFO(err());
    REQUIRE(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  ProcessResult result;
  if (WIFEXITED(status_)) result.code = WEXITSTATUS(status_);
  if (WIFSIGNALED(status_)) result.signal = WTERMSIG(status_);
  result.out = read_text(folder_ / "out");
  result.err = err();
  return result;
}

ProcessResult detrtrain(const std::vector<std::string>& arguments, Detrtrain::Streams streams) { return Detrtrain(arguments, streams).wait(); }

ProcessResult expect_error(const std::vector<std::string>& arguments, int code, const std::string& text) {
  const ProcessResult result = detrtrain(arguments);
  INFO(shown(arguments) << "\nstderr: " << result.err << "wanted: " << text);
  CHECK(result.code == code);
  CHECK(result.signal == 0);
  const std::vector<std::string> errors = result.errors();
  CHECK(errors.size() == 1);
  CHECK((!errors.empty() && errors[0].find(text) != std::string::npos));
  return result;
}

ProcessResult expect_success(const std::vector<std::string>& arguments) {
  const ProcessResult result = detrtrain(arguments);
  INFO(shown(arguments) << "\nstderr: " << result.err);
  REQUIRE(result.code == 0);
  CHECK(result.errors().empty());
  return result;
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace detr::test
