// Reads the names of MindSpore's functions: which function, and for which template arguments it was made.
#pragma once

#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "call.h"

namespace kernels {

// Tells whether a mangled name is that of an instance of this function template, which is in no namespace.
inline bool is_instance(const char* symbol, const char* function) {
  if (symbol[0] != '_' || symbol[1] != 'Z') return false;
  char* rest = nullptr;
  const size_t length = std::strtoul(symbol + 2, &rest, 10);
  return length == std::strlen(function) && std::strncmp(rest, function, length) == 0 && rest[length] == 'I';
}

// Returns the template arguments of such a name, such as {"(BinaryOpType)10", "float", "float", "float"}.
inline std::vector<std::string> template_arguments(const char* symbol) {
  int status = 0;
  char* text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  if (text == nullptr) return {};
  std::vector<std::string> arguments;
  int depth = 0;
  const char* begin = nullptr;
  for (const char* at = std::strchr(text, '<'); at != nullptr && *at != 0; ++at) {
    if (*at == '<' && ++depth == 1) begin = at + 1;
    if (*at == '>') --depth;
    if (depth == 0 || (depth == 1 && *at == ',')) {
      while (*begin == ' ') ++begin;
      arguments.emplace_back(begin, at);
      while (arguments.back().back() == ' ') arguments.back().pop_back();
      begin = at + 1;
    }
    if (depth == 0) break;
  }
  std::free(text);
  return arguments;
}

// Returns the number of an enumerator such as (BinaryOpType)10, or -1.
inline int enumerator(const std::string& argument) {
  const size_t end = argument.find(')');
  return argument[0] == '(' && end != std::string::npos ? std::atoi(argument.c_str() + end + 1) : -1;
}

inline const Dtype* dtype_of(const std::string& argument) {
  for (const Dtype& each : kDtypes) {
    if (argument == each.type) return &each;
  }
  return nullptr;
}

}  // namespace kernels
