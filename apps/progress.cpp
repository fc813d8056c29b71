#include "apps/progress.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/text.h"
#include "runtime/timing.h"

namespace detr::apps {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

std::string timestamp() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

std::size_t terminal_width() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string bar_text(const train::StepRecord& r) {
  constexpr int kCells = 16;
  const auto filled = static_cast<std::size_t>(r.epoch_step * kCells / std::max<std::int64_t>(r.steps_per_epoch, 1));
  return fmt::format("epoch {}/{} [{}{}] {}/{}  loss {:.2f} (vfl {:.2f} l1 {:.2f} giou {:.2f})  {:.1f} img/s  data {:.0f}%  {:.1f} GiB  eta {}", r.epoch, r.epochs,
                     std::string(filled, '#'), std::string(kCells - filled, '-'), r.epoch_step, r.steps_per_epoch, r.loss, train::term(r.terms, "loss_vfl"), train::term(r.terms, "loss_bbox"),
                     train::term(r.terms, "loss_giou"), r.images_per_s, r.seconds > 0 ? 100 * r.data_wait_s / r.seconds : 0, static_cast<double>(r.rss_bytes) / kGiB, duration_text(r.eta_s));
}

std::string line_text(const train::StepRecord& r) {
  return fmt::format("step {} epoch {} {}/{} loss {:.4f} vfl {:.4f} bbox {:.4f} giou {:.4f} lr {:.2e} grad {:.3g} img/s {:.1f} data {:.3f} mem {:.2f}GiB rss {:.2f}GiB skipped {} eta {}",
                     r.step, r.epoch, r.epoch_step, r.steps_per_epoch, r.loss, train::term(r.terms, "loss_vfl"), train::term(r.terms, "loss_bbox"), train::term(r.terms, "loss_giou"),
                     r.group_lr.empty() ? 0 : r.group_lr.back(), r.grad_norm, r.images_per_s, r.data_wait_s, static_cast<double>(r.memory_bytes) / kGiB,
                     static_cast<double>(r.rss_bytes) / kGiB, r.skipped, duration_text(r.eta_s));
}

std::string epoch_text(const train::EpochRecord& r) {
  std::string text = fmt::format("epoch {}  loss {:.4f}", r.epoch, r.loss);
  if (r.evaluation) {
    text += fmt::format("  AP {:.3f}  AP50 {:.3f}", r.evaluation->AP, r.evaluation->AP50);
    if (r.raw_evaluation) text += fmt::format("  (raw weights: AP {:.3f}  AP50 {:.3f})", r.raw_evaluation->AP, r.raw_evaluation->AP50);
    text += fmt::format("  best {:.3f} @{}", r.best_ap, r.best_epoch);
  }
  return text + fmt::format("  train {} eval {}  {:.1f} img/s  data-wait {:.1f}%", duration_text(r.train_s), duration_text(r.eval_s), r.images_per_s, 100 * r.data_wait_share);
}

/// A closed or full stderr loses text, never the run.
void put(const std::string& text) { static_cast<void>(std::fwrite(text.data(), 1, text.size(), stderr)); }

}  // namespace

Progress::Progress(const std::filesystem::path& folder, const CommonOptions& common, std::int64_t print_every)
    : style_(common.quiet ? Style::quiet : common.log_style == "lines" ? Style::lines : common.log_style == "classic" ? Style::classic
             : common.log_style == "bar" || ::isatty(STDERR_FILENO) ? Style::bar : Style::lines),
      print_every_(std::max<std::int64_t>(print_every, 1)),
      log_(folder / "train.log", std::ios::app),
      metrics_(folder),
      last_line_s_(now_s()) {}

void Progress::line(const std::string& text) {
  const std::string safe = escaped(text);
  log_ << timestamp() << ' ' << safe << std::endl;
  if (style_ == Style::quiet) return;
  finish();
  put((style_ == Style::lines ? timestamp() + " " : "") + safe + "\n");
}

void Progress::log_only(const std::string& text) { log_ << timestamp() << ' ' << escaped(text) << std::endl; }

void Progress::note(const std::string& text) { line(text); }

void Progress::warning(const std::string& text) { line("warning: " + text); }

void Progress::draw(const std::string& text) {
  if (now_s() - last_draw_s_ < 0.1) return;
  last_draw_s_ = now_s();
  put("\r" + text.substr(0, terminal_width() - 1) + "\033[K");
  std::fflush(stderr);
  bar_shown_ = true;
}

void Progress::finish() {
  if (!bar_shown_) return;
  put("\r\033[K");
  bar_shown_ = false;
}

void Progress::Smoothed::add(double value) {
  last.push_back(value);
  if (last.size() > 20) last.pop_front();
  sum += value;
  ++count;
}

std::string Progress::Smoothed::text() const {
  std::vector<double> sorted(last.begin(), last.end());
  std::sort(sorted.begin(), sorted.end());
  return fmt::format("{:.4f} ({:.4f})", sorted[(sorted.size() - 1) / 2], sum / static_cast<double>(count));   // the lower middle, as torch.median
}

std::string Progress::classic_text(const train::StepRecord& r) const {
  const std::string total = std::to_string(r.steps_per_epoch);
  std::string text = fmt::format("Epoch: [{}]  [{:>{}}/{}]  eta: {}  lr: {:.6f}  loss: {}", r.epoch, r.epoch_step - 1, total.size(), total, duration_text(r.eta_s),
                                 r.group_lr.empty() ? 0 : r.group_lr[0], smoothed_.at("loss").text());
  for (const auto& [name, value] : r.terms) text += fmt::format("  {}: {}", name, smoothed_.at(name).text());
  return text + fmt::format("  time: {:.4f}  data: {:.4f}", r.seconds, r.data_wait_s);
}

void Progress::step(const train::StepRecord& record) {
  if (style_ == Style::classic) {
    if (record.epoch_step == 1) smoothed_.clear();
    smoothed_["loss"].add(record.loss);
    for (const auto& [name, value] : record.terms) smoothed_[name].add(value);
  }
  metrics_.step(record, record.step % print_every_ == 0);
  if (style_ == Style::bar) draw(bar_text(record));
  const bool due = record.step % print_every_ == 0 || record.step == 1 || now_s() - last_line_s_ > 60;
  if (!due) return;
  last_line_s_ = now_s();
  const std::string text = style_ == Style::classic ? classic_text(record) : line_text(record);
  if (style_ == Style::lines || style_ == Style::classic) line(text);
  else log_ << timestamp() << ' ' << text << std::endl;
}

void Progress::evaluating(std::int64_t done, std::int64_t total) {
  if (style_ == Style::bar) draw(fmt::format("eval {}/{}", done, total));
  if (style_ == Style::lines && now_s() - last_line_s_ > 60) {
    last_line_s_ = now_s();
    line(fmt::format("eval {}/{}", done, total));
  }
}

void Progress::epoch(const train::EpochRecord& record) {
  metrics_.epoch(record);
  line(epoch_text(record));
  if (after_epoch) after_epoch(record);
}

void Progress::saved(const std::string& file, std::int64_t step) { line(fmt::format("saved {} step {}", file, step)); }

}  // namespace detr::apps
