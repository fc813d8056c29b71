#include "dist/exchanges.h"

#include <algorithm>

namespace detr::dist {

std::vector<int> Exchanges::Exchange::ranks(bool here) const {
  std::vector<int> found;
  for (std::size_t r = 0; r < parts.size(); ++r) {
    if (parts[r].has_value() == here) found.push_back(static_cast<int>(r));
  }
  return found;
}

std::vector<Exchanges::Answer> Exchanges::put(int rank, Request request, Time now) {
  std::vector<Exchange>& line = lines_[static_cast<std::size_t>(request.line)];
  const auto place = static_cast<std::size_t>(rank);
  std::erase_if(line, [&](Exchange& exchange) {
    exchange.parts[place].reset();
    return exchange.ranks(true).empty();
  });
  auto exchange = std::ranges::find_if(line, [&](const Exchange& e) { return e.phase == request.phase && e.to_root == request.to_root; });
  if (exchange == line.end()) {
    line.push_back({request.phase, request.to_root, std::vector<std::optional<Part>>(size_)});
    exchange = line.end() - 1;
  }
  const Milliseconds left(std::clamp<std::int64_t>(request.time_left, 0, 1 << 30));
  exchange->parts[place] = Part{request.number, now + left, std::move(request.part)};
  if (!exchange->ranks(false).empty()) return {};

  std::vector<std::string> parts;
  std::vector<Answer> answers;
  for (std::size_t r = 0; r < size_; ++r) {
    answers.push_back({static_cast<int>(r), {request.line, exchange->parts[r]->number}, nullptr});
    parts.push_back(std::move(exchange->parts[r]->bytes));
  }
  const auto body = std::make_shared<const std::string>(reply_body(parts)), none = std::make_shared<const std::string>();
  for (Answer& answer : answers) answer.body = !exchange->to_root || answer.rank == 0 ? body : none;
  line.erase(exchange);
  return answers;
}

void Exchanges::cancel(int rank, const Cancel& cancel) {
  for (Exchange& exchange : lines_[static_cast<std::size_t>(cancel.line)]) {
    std::optional<Part>& part = exchange.parts[static_cast<std::size_t>(rank)];
    if (part && part->number == cancel.number) part->deadline = Time::max();
  }
}

std::optional<Exchanges::Late> Exchanges::late(Time now) const {
  for (const auto& line : lines_) {
    for (const Exchange& exchange : line) {
      if (std::ranges::any_of(exchange.parts, [&](const auto& part) { return part && part->deadline <= now; })) return Late{exchange.ranks(false), exchange.phase};
    }
  }
  return std::nullopt;
}

std::optional<Exchanges::Late> Exchanges::waits_for(int rank) const {
  for (const Exchange& exchange : lines_[static_cast<std::size_t>(Line::main)]) {
    const bool awaited = std::ranges::any_of(exchange.parts, [](const auto& part) { return part && part->deadline != Time::max(); });
    if (awaited && !exchange.parts[static_cast<std::size_t>(rank)]) return Late{exchange.ranks(true), exchange.phase};
  }
  return std::nullopt;
}

std::optional<std::pair<Exchanges::Late, Exchanges::Late>> Exchanges::crossed() const {
  std::vector<Late> groups;
  std::size_t waiting = 0;
  for (const Exchange& exchange : lines_[static_cast<std::size_t>(Line::main)]) {
    if (std::ranges::any_of(exchange.parts, [](const auto& part) { return part && part->deadline == Time::max(); })) return std::nullopt;   // somebody may go on
    groups.push_back({exchange.ranks(true), exchange.phase});
    waiting += groups.back().ranks.size();
  }
  if (groups.size() < 2 || waiting < size_) return std::nullopt;
  std::ranges::stable_sort(groups, {}, [](const Late& group) { return group.ranks.size(); });
  return std::pair(groups.front(), groups.back());
}

}  // namespace detr::dist
