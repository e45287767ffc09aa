find_package(nlohmann_json 3.11 REQUIRED)
