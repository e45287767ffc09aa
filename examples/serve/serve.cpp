// serve MODEL.deplo [PORT]: serves a package of deplo.export on 127.0.0.1, without Python or torch.
//
// It prints "listening on PORT" (0, the default, lets the system choose one) and answers requests, any number on a connection, each connection on a
// thread of its own. Numbers are little-endian. A request is, for each input of the model: for a tensor its rank (u32), its sizes (i64 each) and its
// elements, row-major; for an integer its value (i64). The answer is a status (u32): 0, then the number of outputs (u32) and for each its kind (u32)
// and, of a tensor, dtype and rank (u32 each, as in deplo_runtime.h), sizes and elements, row-major, of an integer its value, of a constant the
// length (u32) of its JSON and that; or 1, then the length of a text (u32) that says what was wrong, and the text.

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "deplo_runtime.h"

namespace {

constexpr uint32_t kMostRank = 64;
constexpr int64_t kMostBytes = int64_t{1} << 32;  // of one input

int64_t bytes_of(deplo_dtype dtype) {
  constexpr int64_t kBytes[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
  return kBytes[dtype];
}

bool read_all(int socket, void* into, size_t bytes) {
  auto* at = static_cast<char*>(into);
  while (bytes > 0) {
    const ssize_t got = recv(socket, at, bytes, 0);
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

bool write_all(int socket, const std::string& from) {
  for (size_t done = 0; done < from.size();) {
    const ssize_t sent = send(socket, from.data() + done, from.size() - done, 0);
    if (sent <= 0) return false;
    done += static_cast<size_t>(sent);
  }
  return true;
}

template <class T>
void add(std::string& answer, T number) {
  answer.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

/// An input and the memory that it points to.
struct Input {
  deplo_value value{};
  std::vector<int64_t> sizes;
  std::vector<char> data;
};

/// Reads one input; false if the client is gone or asks for what no client should.
bool read_input(int socket, const deplo_model* model, size_t place, Input& input) {
  input.value.kind = deplo_input_kind(model, place);
  if (input.value.kind == DEPLO_INTEGER) return read_all(socket, &input.value.integer, sizeof(int64_t));
  input.value.dtype = deplo_input_dtype(model, place);
  uint32_t rank = 0;
  if (!read_all(socket, &rank, sizeof(rank)) || rank > kMostRank) return false;
  input.sizes.resize(rank);
  if (!read_all(socket, input.sizes.data(), rank * sizeof(int64_t))) return false;
  int64_t bytes = bytes_of(input.value.dtype);
  for (int64_t size : input.sizes) {
    if (size < 0 || size > kMostBytes || (size > 0 && bytes > kMostBytes / size)) return false;
    bytes *= size;
  }
  input.data.resize(static_cast<size_t>(bytes));
  if (!read_all(socket, input.data.data(), input.data.size())) return false;
  input.value.rank = static_cast<int32_t>(rank);
  input.value.sizes = input.sizes.data();
  input.value.data = input.data.data();
  return true;
}

/// The elements of a tensor in row-major order.
void add_elements(std::string& answer, const deplo_value& value) {
  const auto size = static_cast<size_t>(bytes_of(value.dtype));
  int64_t count = 1;
  for (int d = 0; d < value.rank; ++d) count *= value.sizes[d];
  std::vector<int64_t> index(static_cast<size_t>(value.rank));
  for (int64_t k = 0, offset = 0; k < count; ++k) {
    answer.append(static_cast<const char*>(value.data) + static_cast<size_t>(offset) * size, size);
    for (int d = value.rank; d-- > 0;) {
      const auto at = static_cast<size_t>(d);
      const int64_t stride = value.strides ? value.strides[d] : 0;
      offset += stride;
      if (++index[at] < value.sizes[d]) break;
      offset -= stride * value.sizes[d];
      index[at] = 0;
    }
  }
}

void add_output(std::string& answer, const deplo_value& value) {
  add<uint32_t>(answer, value.kind);
  if (value.kind == DEPLO_INTEGER) {
    add(answer, value.integer);
  } else if (value.kind == DEPLO_CONSTANT) {
    add(answer, static_cast<uint32_t>(std::strlen(value.json)));
    answer += value.json;
  } else {
    add<uint32_t>(answer, value.dtype);
    add(answer, static_cast<uint32_t>(value.rank));
    for (int d = 0; d < value.rank; ++d) add(answer, value.sizes[d]);
    add_elements(answer, value);
  }
}

std::string answer_to(deplo_model* model, const std::vector<Input>& inputs) {
  std::vector<deplo_value> values;
  for (const Input& input : inputs) values.push_back(input.value);
  std::string answer;
  deplo_results* results = deplo_run(model, values.data(), values.size());
  if (!results) {
    const std::string error = deplo_last_error();
    add<uint32_t>(answer, 1);
    add(answer, static_cast<uint32_t>(error.size()));
    return answer + error;
  }
  add<uint32_t>(answer, 0);
  add(answer, static_cast<uint32_t>(deplo_output_count(model)));
  for (size_t k = 0; k < deplo_output_count(model); ++k) add_output(answer, *deplo_result(results, k));
  deplo_free_results(results);
  return answer;
}

void serve(int socket, deplo_model* model) {
  for (;;) {
    std::vector<Input> inputs(deplo_input_count(model));
    bool complete = true;
    for (size_t i = 0; i < inputs.size() && complete; ++i) complete = read_input(socket, model, i, inputs[i]);
    if (!complete || !write_all(socket, answer_to(model, inputs))) break;
  }
  close(socket);
}

int listen_on(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (socket < 0 || bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(socket, 64) != 0) return -1;
  socklen_t length = sizeof(address);
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  std::printf("listening on %d\n", ntohs(address.sin_port));
  std::fflush(stdout);
  return socket;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: serve MODEL.deplo [PORT]\n");
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);  // a client that goes away is no reason to end
  deplo_model* model = deplo_open(argv[1], nullptr);
  if (!model) {
    std::fprintf(stderr, "%s\n", deplo_last_error());
    return 1;
  }
  const int listener = listen_on(argc == 3 ? std::atoi(argv[2]) : 0);
  if (listener < 0) {
    std::perror("serve");
    return 1;
  }
  for (;;) {
    const int socket = accept(listener, nullptr, nullptr);
    if (socket >= 0) std::thread(serve, socket, model).detach();
  }
}
