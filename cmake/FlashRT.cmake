# SPDX-License-Identifier: Apache-2.0
# FlashRT::flashrt, the static library of ggml-flashrt with include/flashrt.h, and flashrt_hook() for the hook patch.
# Use it by include(), by add_subdirectory(<ggml-flashrt>/cmake), or by find_package(FlashRT PATHS <ggml-flashrt>/cmake).
#
#   GGML_CUDA_FLASHRT_LIB     a prebuilt libggml_flashrt.a; without it cargo builds one inside the build tree
#   CMAKE_CUDA_ARCHITECTURES  what cargo compiles the kernels for; below sm_80 there are none and the host runs its own
#   CMAKE_CUDA_COMPILER       the nvcc that cargo uses
#   GGML_CUDA_FLASHRT_FA4     ON: with the attention modules that `cargo xtask fa4` compiled on this machine
include_guard(GLOBAL)

option(GGML_CUDA_FLASHRT_FA4 "ggml: ggml-flashrt with attention modules of cargo xtask fa4" OFF)
get_filename_component(FLASHRT_ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

# Sets `result` to the entries of CMAKE_CUDA_ARCHITECTURES that the kernels can be compiled for.
function(flashrt_architectures result)
    set(wanted "${CMAKE_CUDA_ARCHITECTURES}")
    if (wanted STREQUAL "native")
        set(wanted "${CMAKE_CUDA_ARCHITECTURES_NATIVE}")
    endif()
    set(usable "")
    foreach(arch IN LISTS wanted)
        if (arch MATCHES "^([0-9]+)" AND CMAKE_MATCH_1 GREATER_EQUAL 80)
            list(APPEND usable "${arch}")
        endif()
    endforeach()
    if (NOT usable)
        message(FATAL_ERROR "ggml-flashrt: none of CMAKE_CUDA_ARCHITECTURES=\"${CMAKE_CUDA_ARCHITECTURES}\" has kernels; "
                            "name numbers from 80 on, such as -DCMAKE_CUDA_ARCHITECTURES=90")
    endif()
    set(${result} "${usable}" PARENT_SCOPE)
endfunction()

# Refuses an nvcc that cannot compile the kernels now, not in the middle of a build: what build/toolkit.rs demands.
function(flashrt_check_nvcc)
    set(minimum 12.8)
    if (CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)110")
        set(minimum 13.0)
    endif()
    if (CMAKE_CUDA_COMPILER_VERSION AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS minimum)
        message(FATAL_ERROR "ggml-flashrt: ${CMAKE_CUDA_COMPILER} is CUDA ${CMAKE_CUDA_COMPILER_VERSION}, but the kernels need "
                            "${minimum} or newer for CMAKE_CUDA_ARCHITECTURES=\"${CMAKE_CUDA_ARCHITECTURES}\"; name a newer one "
                            "with -DCMAKE_CUDA_COMPILER=<path>, or give a prebuilt archive with -DGGML_CUDA_FLASHRT_LIB=<path>")
    endif()
endfunction()

# Adds the target flashrt_cargo and sets `archive` to what it builds. Cargo itself knows what is out of date, so it runs in every
# build.
function(flashrt_cargo_build archive)
    find_program(FLASHRT_CARGO cargo HINTS "$ENV{CARGO_HOME}/bin" "$ENV{HOME}/.cargo/bin")
    if (NOT FLASHRT_CARGO)
        message(FATAL_ERROR "ggml-flashrt: cargo was not found on PATH nor in ~/.cargo/bin. Install Rust, name it with "
                            "-DFLASHRT_CARGO=<path>, or give a prebuilt archive with -DGGML_CUDA_FLASHRT_LIB=<path>")
    endif()
    flashrt_architectures(archs)
    flashrt_check_nvcc()
    message(STATUS "ggml-flashrt: ${FLASHRT_CARGO} builds the kernels for ${archs}")
    string(REPLACE ";" "$<SEMICOLON>" archs "${archs}")

    set(env "FLASHRT_CUDA_ARCHS=${archs}" "NVCC=${CMAKE_CUDA_COMPILER}")
    if (CMAKE_CUDA_HOST_COMPILER)
        list(APPEND env "NVCC_CCBIN=${CMAKE_CUDA_HOST_COMPILER}")
    endif()
    set(features "cuda")
    if (GGML_CUDA_FLASHRT_FA4)
        set(features "cuda,fa4")
    endif()
    set(target_dir "${CMAKE_BINARY_DIR}/flashrt")
    set(built "${target_dir}/release/libggml_flashrt.a")
    add_custom_target(flashrt_cargo
        COMMAND "${CMAKE_COMMAND}" -E env ${env}
                "${FLASHRT_CARGO}" build --release --lib --features "${features}"
                --manifest-path "${FLASHRT_ROOT}/Cargo.toml" --target-dir "${target_dir}"
        BYPRODUCTS "${built}"
        COMMENT "Building libggml_flashrt.a"
        USES_TERMINAL VERBATIM)
    set(${archive} "${built}" PARENT_SCOPE)
endfunction()

if (GGML_CUDA_FLASHRT_LIB)
    if (NOT EXISTS "${GGML_CUDA_FLASHRT_LIB}")
        message(FATAL_ERROR "ggml-flashrt: GGML_CUDA_FLASHRT_LIB=\"${GGML_CUDA_FLASHRT_LIB}\" does not exist")
    endif()
    get_filename_component(FLASHRT_ARCHIVE "${GGML_CUDA_FLASHRT_LIB}" ABSOLUTE)
else()
    flashrt_cargo_build(FLASHRT_ARCHIVE)
endif()

find_package(Threads REQUIRED)
find_package(CUDAToolkit REQUIRED)
add_library(FlashRT::flashrt STATIC IMPORTED GLOBAL)
if (TARGET flashrt_cargo)
    add_dependencies(FlashRT::flashrt flashrt_cargo)
endif()
# cudart is the host's choice. It is named here too because a linker reads static archives in order: ours before cudart's.
set_target_properties(FlashRT::flashrt PROPERTIES
    IMPORTED_LOCATION             "${FLASHRT_ARCHIVE}"
    INTERFACE_INCLUDE_DIRECTORIES "${FLASHRT_ROOT}/include"
    INTERFACE_LINK_LIBRARIES      "$<IF:$<BOOL:${GGML_STATIC}>,CUDA::cudart_static,CUDA::cudart>;Threads::Threads;${CMAKE_DL_LIBS};m")
if (UNIX AND NOT APPLE)
    # Keeps the archive's symbols, Rust's standard library among them, out of the dynamic symbol table. Only this archive's: what
    # the host does with the others is not ours to change.
    get_filename_component(name "${FLASHRT_ARCHIVE}" NAME)
    set_target_properties(FlashRT::flashrt PROPERTIES INTERFACE_LINK_OPTIONS "LINKER:--exclude-libs,${name}")
endif()

# Compiles `source` of `target` with the hooks and links the library. The definition and the include paths go to this one file
# only: every other object of ggml-cuda stays what it is without us, in a compiler cache too.
function(flashrt_hook target source)
    set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_DEFINITIONS GGML_CUDA_FLASHRT)
    set_property(SOURCE "${source}" APPEND PROPERTY INCLUDE_DIRECTORIES "${FLASHRT_ROOT}/host" "${FLASHRT_ROOT}/include")
    target_link_libraries(${target} PRIVATE $<LINK_ONLY:FlashRT::flashrt>)
    message(STATUS "Using ggml-flashrt: ${FLASHRT_ARCHIVE}")
endfunction()
