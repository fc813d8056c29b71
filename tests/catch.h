#pragma once
// Catch2 3.x where it is installed, else 2.13 (Debian 12). Tests include this header alone.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
#ifndef SKIP   // new in 3.3; this one leaves only the function it stands in
#define SKIP(text)              \
  do {                          \
    WARN("skipped: " << text);  \
    return;                     \
  } while (false)
#endif
