// Runs packages of deplo.export from C and C++, without Python, torch and LLVM: docs/packages.md.
//
//   deplo_model* model = deplo_open("model.deplo", NULL);
//   if (!model) { puts(deplo_last_error()); return 1; }
//   int64_t sizes[] = {8, 64};
//   deplo_value x = {.kind = DEPLO_TENSOR, .dtype = DEPLO_F32, .rank = 2, .data = memory, .sizes = sizes};
//   deplo_results* results = deplo_run(model, &x, 1);
//   const deplo_value* y = deplo_result(results, 0);
//   ...
//   deplo_free_results(results);
//   deplo_close(model);
//
// Functions that can fail return NULL; deplo_last_error() says why, in the calling thread. Any thread may call; calls of a model that writes buffers
// wait for each other. A package is machine code: open none of a source that you do not trust.

#ifndef DEPLO_RUNTIME_H
#define DEPLO_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DEPLO_API __attribute__((visibility("default")))

// NOLINTBEGIN(modernize-use-using): C
typedef struct deplo_model deplo_model;
typedef struct deplo_results deplo_results;

typedef enum deplo_kind {
  DEPLO_TENSOR = 0,
  DEPLO_INTEGER = 1,   // a size that is passed or returned as a number
  DEPLO_CONSTANT = 2,  // of results alone: a value that was the same at every call, as JSON
} deplo_kind;

// As they lie in memory: a bool is one byte, 0 or 1; f16 and bf16 are two; f8e4m3 is the byte of a float8_e4m3fn.
typedef enum deplo_dtype {
  DEPLO_BOOL = 0,
  DEPLO_U8 = 1,
  DEPLO_I8 = 2,
  DEPLO_I16 = 3,
  DEPLO_I32 = 4,
  DEPLO_I64 = 5,
  DEPLO_F16 = 6,
  DEPLO_BF16 = 7,
  DEPLO_F32 = 8,
  DEPLO_F64 = 9,
  DEPLO_F8E4M3 = 10,
} deplo_dtype;

typedef struct deplo_value {
  deplo_kind kind;
  deplo_dtype dtype;
  int32_t rank;
  void* data;              // of a tensor: its first element; a call writes it if deplo_input_is_written says so
  const int64_t* sizes;    // rank of them
  const int64_t* strides;  // in elements; of an input NULL for row-major
  int64_t integer;
  const char* json;
} deplo_value;

typedef struct deplo_options {
  const char* features;  // use no more CPU features than these: "sse", "avx2", "avx512"; NULL: all
  int32_t threads;       // of a call; 0: as many as there are processors
  const char* check;     // of constants: "quick" (checksums that find damage), "full" (SHA-256), "code" (none); NULL: quick
  int64_t memory_limit;  // most bytes of one call's temporaries; 0: any
} deplo_options;

// Opens a package for this CPU. `options` may be NULL.
DEPLO_API deplo_model* deplo_open(const char* path, const deplo_options* options);
DEPLO_API void deplo_close(deplo_model* model);

// The inputs of a call, in order: those of the exported model that are tensors or integers, args before kwargs, nested ones from left to right.
DEPLO_API size_t deplo_input_count(const deplo_model* model);
DEPLO_API const char* deplo_input_name(const deplo_model* model, size_t input);
DEPLO_API deplo_kind deplo_input_kind(const deplo_model* model, size_t input);
DEPLO_API deplo_dtype deplo_input_dtype(const deplo_model* model, size_t input);
DEPLO_API int32_t deplo_input_rank(const deplo_model* model, size_t input);
// Of a dimension; -1 where it is symbolic: deplo_manifest says of which symbols, and their ranges.
DEPLO_API int64_t deplo_input_size(const deplo_model* model, size_t input, int32_t dimension);
DEPLO_API int deplo_input_is_written(const deplo_model* model, size_t input);
DEPLO_API size_t deplo_output_count(const deplo_model* model);
// The set of CPU features whose code runs.
DEPLO_API const char* deplo_features(const deplo_model* model);
// All that the package says of itself, as JSON.
DEPLO_API const char* deplo_manifest(const deplo_model* model);

// Runs the model. Sizes and strides must be those that it was exported for, symbols within their ranges. Results are valid until they are freed; one
// that is an input itself points to that input's memory.
DEPLO_API deplo_results* deplo_run(deplo_model* model, const deplo_value* inputs, size_t count);
DEPLO_API const deplo_value* deplo_result(const deplo_results* results, size_t output);
DEPLO_API void deplo_free_results(deplo_results* results);

// Why the latest call of this thread failed.
DEPLO_API const char* deplo_last_error(void);
// NOLINTEND(modernize-use-using)

#ifdef __cplusplus
}
#endif

#endif
