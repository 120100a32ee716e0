// Checks that stay in optimised builds.
#ifndef TRTPU_TESTS_CHECK_H_
#define TRTPU_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

#endif  // TRTPU_TESTS_CHECK_H_
