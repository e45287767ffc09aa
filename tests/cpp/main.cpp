#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

#include "target/targets.h"

int main(int argc, char** argv) {
  deplo::register_targets();
  return Catch::Session().run(argc, argv);
}
