// Replaces functions that a loaded library calls, or has in tables of virtual functions, by others.
//
// The dynamic linker has written the functions' addresses to the places that the library's relocations name. These
// places are found by the functions' names and written again; the library's code stays as it is.
#pragma once

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace msops {

struct Place {
  std::atomic<void*>* at;
  void* original;
  void* replacement;
};

class Relocations {
 public:
  // Returns the replacement of a function, or null to leave it.
  using Choose = std::function<void*(const char* symbol, void* original)>;

  // Looks through the libraries whose file has the name in its path. Nothing is replaced yet.
  void find(const char* library, const Choose& choose) {
    search_ = {this, library, &choose};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* self) { return static_cast<Relocations*>(self)->visit(*info); }, this);
  }

  void replace() const {
    for (const Place& place : places_) write(place, place.replacement);
  }
  void restore() const {
    for (const Place& place : places_) write(place, place.original);
  }
  bool empty() const { return places_.empty(); }

 private:
  int visit(const dl_phdr_info& info) {
    if (std::strstr(info.dlpi_name, search_.library) == nullptr) return 0;
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    const ElfW(Rela) * tables[2] = {};
    size_t bytes[2] = {};
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      if (info.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
      auto* entry = reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr);
      for (; entry->d_tag != DT_NULL; ++entry) {
        const auto pointer = entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(pointer);
        if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(pointer);
        if (entry->d_tag == DT_RELA) tables[0] = reinterpret_cast<const ElfW(Rela)*>(pointer);
        if (entry->d_tag == DT_JMPREL) tables[1] = reinterpret_cast<const ElfW(Rela)*>(pointer);
        if (entry->d_tag == DT_RELASZ) bytes[0] = entry->d_un.d_val;
        if (entry->d_tag == DT_PLTRELSZ) bytes[1] = entry->d_un.d_val;
      }
    }
    for (int table = 0; table < 2; ++table) {
      for (size_t i = 0; i < bytes[table] / sizeof(ElfW(Rela)); ++i) {
        const ElfW(Rela) & relocation = tables[table][i];
        const auto type = ELF64_R_TYPE(relocation.r_info);
        if (type != R_X86_64_64 && type != R_X86_64_GLOB_DAT && type != R_X86_64_JUMP_SLOT) continue;
        const char* symbol = names + symbols[ELF64_R_SYM(relocation.r_info)].st_name;
        auto* at = reinterpret_cast<std::atomic<void*>*>(info.dlpi_addr + relocation.r_offset);
        if (void* replacement = (*search_.choose)(symbol, at->load())) places_.push_back({at, at->load(), replacement});
      }
    }
    return 0;
  }

  // The dynamic linker makes these places read-only once it has written them.
  static void write(const Place& place, void* function) {
    const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    auto* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(place.at) & ~(size - 1));
    mprotect(page, size, PROT_READ | PROT_WRITE);
    place.at->store(function);
    // The page stays writable, since other data of the library may lie in it.
  }

  struct Search {
    Relocations* self;
    const char* library;
    const Choose* choose;
  } search_{};
  std::vector<Place> places_;
};

}  // namespace msops
