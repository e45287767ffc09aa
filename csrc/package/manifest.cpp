#include "package/manifest.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "package/link.h"

namespace deplo::package {
namespace {

using nlohmann::json;

class Reader {
 public:
  Reader(const std::string& path, uint64_t file_bytes) : path_(path), file_bytes_(file_bytes) {}

  Manifest read(const json& all) {
    for (const json& item : all.at("tensors")) manifest_.tensors.push_back(tensor(item));
    for (const json& item : all.at("inputs")) {
      UserInput input{item.at("name"), item.at("is_tensor"), DType::i64, {}, false};
      if (input.is_tensor) {
        input.dtype = dtype(item.at("dtype"));
        input.sizes = item.at("sizes").get<std::vector<std::string>>();
        input.is_written = item.at("is_written");
      }
      manifest_.inputs.push_back(std::move(input));
    }
    for (const json& item : all.at("outputs")) manifest_.outputs.push_back(output(item));
    for (const json& item : all.at("variants")) manifest_.variants.push_back(variant(item));
    return std::move(manifest_);
  }

 private:
  template <class... Args>
  void check(bool holds, fmt::format_string<Args...> what, Args&&... args) const {
    if (!holds) throw UserError(fmt::format("{} is damaged: {}", path_, fmt::format(what, std::forward<Args>(args)...)));
  }

  DType dtype(const json& name) const {
    auto found = parse_dtype(name.get<std::string>());
    check(found.has_value(), "it names the dtype {}", name.dump());
    return *found;
  }

  Section section(const json& item) const {
    Section made{item.at("offset"), item.at("bytes"), item.at("sha256")};
    check(made.offset <= file_bytes_ && made.bytes <= file_bytes_ - made.offset, "a part of {} bytes at {} lies outside of the file", made.bytes,
          made.offset);
    return made;
  }

  PackedTensor tensor(const json& item) const {
    PackedTensor made{item.at("name"), dtype(item.at("dtype")), item.at("sizes"),     item.at("strides"),
                      section(item),   item.at("quick"),        item.at("is_written")};
    check(made.sizes.size() == made.strides.size(), "{} has {} sizes and {} strides", made.name, made.sizes.size(), made.strides.size());
    constexpr int64_t kMost = 1LL << 40;  // products below stay within 64 bits, and so do their sums
    int64_t last = 0;
    bool is_empty = false;
    for (size_t d = 0; d < made.sizes.size(); ++d) {
      const int64_t size = made.sizes[d];
      const int64_t stride = made.strides[d];
      check(size >= 0 && stride >= 0 && size < kMost && (size <= 1 || stride < kMost / size), "{} has size {}, stride {}", made.name, size, stride);
      is_empty = is_empty || size == 0;
      if (size > 1) last += (size - 1) * stride;
      check(last < kMost, "{} has {} elements", made.name, last);
    }
    check(is_empty || static_cast<uint64_t>((last + 1) * size_of(made.dtype)) <= made.section.bytes, "{} has {} bytes", made.name,
          made.section.bytes);
    check(made.section.offset % 64 == 0, "{} lies at {}", made.name, made.section.offset);
    return made;
  }

  UserOutput output(const json& item) const {
    const std::string kind = item.at("kind");
    UserOutput made;
    if (kind == "constant") {
      made.kind = UserOutput::Kind::constant;
      made.constant = item.at("value").dump();
      return made;
    }
    made.kind = kind == "input" ? UserOutput::Kind::input : UserOutput::Kind::result;
    made.index = item.at("index");
    check(kind == "result" || (kind == "input" && made.index < manifest_.inputs.size()), "an output is {}", item.dump());
    return made;
  }

  Variant variant(const json& item) const {
    Variant made;
    made.name = item.at("name");
    made.features = item.at("features").get<std::set<std::string>>();
    made.program = section(item.at("program"));
    made.code = section(item.at("code"));
    made.text_bytes = item.at("text_bytes");
    made.entries = item.at("entries").get<std::vector<uint64_t>>();
    made.externals = item.at("externals").get<std::vector<std::string>>();
    made.library = item.at("library").get<std::vector<std::string>>();
    check(made.text_bytes <= made.code.bytes && made.text_bytes % kPage == 0 && made.code.bytes % kPage == 0 && made.text_bytes > 0,
          "its code for {} has {} bytes of {}", made.name, made.text_bytes, made.code.bytes);
    for (uint64_t entry : made.entries) check(entry < made.text_bytes, "a kernel for {} starts at {}", made.name, entry);
    for (const json& argument : item.at("arguments")) {
      const bool is_tensor = argument.contains("tensor");
      Variant::Argument place{is_tensor, argument.at(is_tensor ? "tensor" : "input")};
      check(place.index < (is_tensor ? manifest_.tensors.size() : manifest_.inputs.size()), "an argument is {}", argument.dump());
      made.arguments.push_back(place);
    }
    return made;
  }

  const std::string& path_;
  uint64_t file_bytes_;
  Manifest manifest_;
};

}  // namespace

Manifest parse_manifest(const std::string& text, const std::string& path, uint64_t file_bytes) {
  try {
    Manifest manifest = Reader(path, file_bytes).read(json::parse(text));
    manifest.text = text;
    return manifest;
  } catch (const json::exception& error) {
    throw UserError(fmt::format("{} is damaged: its manifest does not read: {}", path, error.what()));
  }
}

}  // namespace deplo::package
