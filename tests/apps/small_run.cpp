#include "tests/apps/small_run.h"

#include <sstream>

#include "runtime/safetensors.h"

namespace detr::test {

namespace fs = std::filesystem;

SmallData::SmallData(const std::vector<std::string>& synth_flags) {
  expect_success(std::vector<std::string>{"synth", "--out", data(), "--images", "12", "--size", "96x96", "-q"} + synth_flags);
}

std::vector<std::string> SmallData::train_on(const std::string& folder, const std::string& output, const std::vector<std::string>& more) const {
  return std::vector<std::string>{"train", "-c", "tiny", "-u", "RTDETRTransformerv2.num_queries=30", "--imgsz", "96", "--batch-size", "2", "--num-workers", "1",
                                  "--data", folder, "--output-dir", path(output)} + more;
}

nlohmann::json read_json(const fs::path& file) {
  const nlohmann::json object = nlohmann::json::parse(read_text(file), nullptr, false);
  INFO(file);
  REQUIRE(!object.is_discarded());
  return object;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<double> losses_of(const fs::path& run) {
  std::vector<double> losses;
  for (const std::string& line : lines_of(read_text(run / "log.txt"))) losses.push_back(nlohmann::json::parse(line).at("train_loss"));
  return losses;
}

void expect_same_tensors(const fs::path& a, const fs::path& b) {
  const SafetensorsFile x(a), y(b);
  REQUIRE(x.names() == y.names());
  for (const std::string& name : x.names()) {
    INFO(name);
    expect_same_bits(x.read(name), y.read(name));
  }
}

void rewrite_data(const fs::path& from, const fs::path& to, const std::function<void(nlohmann::json&)>& change) {
  fs::create_directories(to / "annotations");
  fs::create_directory_symlink(fs::absolute(from / "images"), to / "images");
  for (const char* split : {"train", "val"}) {
    const std::string name = concat("instances_", split, ".json");
    nlohmann::json coco = read_json(from / "annotations" / name);
    change(coco);
    write_text(to / "annotations" / name, coco.dump());
  }
}

}  // namespace detr::test
