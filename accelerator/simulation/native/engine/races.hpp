// Collects the accesses of a call (race_call.hpp) and tells race detection of them, with the stream and the line of the program.
#pragma once

#include "device.hpp"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <dlfcn.h>

#include <array>
#include <map>
#include <string>
#include <typeinfo>

namespace engine {

inline const race_functions* races = nullptr; // unless races are to be reported

// A weak reference to a storage.
inline void release_owner(void* owner)
{
    c10::weak_intrusive_ptr<StorageImpl>::reclaim(static_cast<StorageImpl*>(owner));
}

// The address of its memory, or 0 if the storage is gone.
inline uintptr_t data_of_owner(void* owner)
{
    auto* const storage = static_cast<StorageImpl*>(owner);
    if (c10::raw::weak_intrusive_ptr::use_count(storage) == 0)
        return 0;
    return reinterpret_cast<uintptr_t>(storage->_mutable_data_ptr_no_checks().get());
}

inline void* current_stream(int device)
{
    void* result = nullptr;
    aoti_torch_get_current_cuda_stream(device, &result);
    return result;
}

inline const race_storages storages{&data_of_owner, &release_owner, &current_stream};

// Python's name of a type, which lives as long as the process.
inline const char* name_of(c10::ScalarType type)
{
    static std::array<std::atomic<const char*>, size_t(c10::ScalarType::NumOptions)> names;
    auto& name = names[size_t(type)];
    if (name == nullptr)
        name = (new std::string(c10::getDtypeNames(type).first))->c_str(); // twice, if two threads are here
    return name;
}

// Finds the line of the program with functions of Python that every version has; torch's headers may lack Python's.
class Places {
public:
    Places()
    {
        const auto find = [](auto& function, const char* name) { *reinterpret_cast<void**>(&function) = dlsym(RTLD_DEFAULT, name); };
        find(thread_state_, "PyGILState_GetThisThreadState");
        find(is_initialized_, "Py_IsInitialized");
        find(ensure_, "PyGILState_Ensure");
        find(release_, "PyGILState_Release");
        find(frame_, "PyEval_GetFrame");
        find(back_, "PyFrame_GetBack");
        find(code_, "PyFrame_GetCode");
        find(line_, "PyFrame_GetLineNumber");
        find(get_, "PyObject_GetAttrString");
        find(text_, "PyUnicode_AsUTF8");
        find(increment_, "Py_IncRef");
        find(decrement_, "Py_DecRef");
        find(clear_, "PyErr_Clear");
    }

    // Takes the GIL: the caller may hold no lock.
    int current()
    {
        int place = 0;
        if (thread_state_ && thread_state_() && is_initialized_()) {
            const int state = ensure_();
            place = find();
            release_(state);
        }
        return place ? place : of_node();
    }

private:
    struct Code {
        int owner;
        std::string path, name;
        std::map<std::pair<int, int>, int> places; // by line, and by the place in a library that the line calls, or 0

        std::string text(int line) const // as races/places.c writes it
        {
            return path + ":" + std::to_string(line) + " in " + name;
        }
    };

    int find()
    {
        void* frame = frame_();
        if (!frame)
            return 0;
        increment_(frame);
        int place = 0, library = 0;
        std::string first, of_library;
        while (frame) {
            void* const object = code_(frame);
            auto found = codes_.find(object);
            if (found == codes_.end()) {
                increment_(object); // for ever, so that no other code gets this address
                Code code{RACE_OF_PROGRAM, attribute(object, "co_filename"), attribute(object, "co_name"), {}};
                code.owner = races->code_owner(code.path.c_str(), code.name.c_str());
                found = codes_.emplace(object, std::move(code)).first;
            }
            decrement_(object);
            Code& code = found->second;
            if (code.owner == RACE_OF_TORCH) {
                if (first.empty())
                    first = code.text(line_(frame));
            } else if (code.owner == RACE_OF_PROGRAM || library == 0) {
                const int line = line_(frame);
                int& known = code.places[{line, code.owner == RACE_OF_PROGRAM ? library : 0}];
                const std::string text = known == 0 || code.owner == RACE_OF_LIBRARY ? code.text(line) : std::string();
                if (known == 0)
                    known = races->place((of_library.empty() ? text : text + ", through " + of_library).c_str());
                if (code.owner == RACE_OF_PROGRAM) {
                    place = known;
                    break;
                }
                library = known;
                of_library = text;
            }
            void* const outer = back_(frame);
            decrement_(frame);
            frame = outer;
        }
        if (frame)
            decrement_(frame);
        place = place ? place : library;
        return place || first.empty() ? place : races->place(first.c_str());
    }

    std::string attribute(void* object, const char* name)
    {
        void* const value = get_(object, name);
        const char* const text = value ? text_(value) : nullptr;
        std::string result = text ? text : "?";
        if (value)
            decrement_(value);
        if (!text)
            clear_();
        return result;
    }

    // A thread of autograd runs no Python code: the name of the function whose backward it computes.
    int of_node()
    {
        const auto node = torch::autograd::get_current_node();
        if (!node)
            return 0;
        const auto& function = *node;
        const char* const type = typeid(function).name();
        std::lock_guard<std::mutex> guard(lock_);
        int& place = nodes_[type];
        if (place == 0) {
            place = races->place(("the backward pass, in " + function.name()).c_str());
        }
        return place;
    }

    void* (*thread_state_)();
    int (*is_initialized_)();
    int (*ensure_)();
    void (*release_)(int);
    void* (*frame_)();
    void* (*back_)(void*);
    void* (*code_)(void*);
    int (*line_)(void*);
    void* (*get_)(void*, const char*);
    const char* (*text_)(void*);
    void (*increment_)(void*);
    void (*decrement_)(void*);
    void (*clear_)();
    std::unordered_map<void*, Code> codes_; // guarded by the GIL
    std::mutex lock_;
    std::unordered_map<const char*, int> nodes_;
};

// The accesses of one call.
class RaceScope {
public:
    explicit RaceScope(const char* name) : name_(name)
    {
        static Places places;
        place_ = places.current();
        outer_ = races->set_place(place_);
    }

    ~RaceScope()
    {
        if (is_transfer_)
            races->op_ends();
        for (const auto& access : accesses_)
            if (access.owner)
                release_owner(access.owner);
        races->set_place(outer_);
    }

    RaceScope(const RaceScope&) = delete;
    RaceScope& operator=(const RaceScope&) = delete;

    void add(const TensorImpl* tensor, int32_t flags)
    {
        const auto keys = tensor->key_set();
        if (!(keys.has(DispatchKey::CUDA) || keys.has(DispatchKey::CPU)) || !tensor->has_storage() || tensor->numel() == 0)
            return; // sparse, nested or quantized, or without memory
        StorageImpl* const storage = tensor->unsafe_storage().unsafeGetStorageImpl();
        const auto start = reinterpret_cast<uintptr_t>(storage->data());
        if (start == 0)
            return;
        const auto item_size = int64_t(tensor->dtype().itemsize());
        race_layout layout;
        layout.address = start + uintptr_t(item_size * tensor->storage_offset());
        layout.item_size = item_size;
        layout.dims = tensor->dim();
        if (layout.dims <= RACE_MAX_DIMS) {
            std::copy(tensor->sizes().begin(), tensor->sizes().end(), layout.sizes);
            std::copy(tensor->strides().begin(), tensor->strides().end(), layout.strides);
        } else {
            int64_t last = 0;
            for (int64_t i = 0; i < layout.dims; i++)
                last += (tensor->size(i) - 1) * tensor->stride(i);
            layout.dims = -1;
            layout.sizes[0] = (last + 1) * item_size;
        }
        void* const owner = c10::weak_intrusive_ptr<StorageImpl>(tensor->storage().getWeakStorageImpl()).release();
        accesses_.push_back({layout, owner, name_of(c10::typeMetaToScalarType(tensor->dtype())), flags});
        devices_.push_back(tensor->is_cuda() ? tensor->device().index() : c10::DeviceIndex(-1));
    }

    // The runtime records the copies of the op itself.
    void begin_transfer()
    {
        is_transfer_ = true;
        races->op(nullptr, 0, name_, accesses_.data(), accesses_.size(), place_, 1);
    }

    // Records the accesses so far, each on the current stream of its device.
    void record()
    {
        std::vector<race_access> own;
        while (!accesses_.empty()) {
            const auto device = devices_.back();
            own.clear();
            size_t left = 0;
            for (size_t i = 0; i < accesses_.size(); i++) {
                if (devices_[i] == device) {
                    own.push_back(accesses_[i]);
                } else {
                    accesses_[left] = accesses_[i];
                    devices_[left++] = devices_[i];
                }
            }
            accesses_.resize(left);
            devices_.resize(left);
            if (device >= 0)
                races->op(current_stream(device), device, name_, own.data(), own.size(), place_, 0);
            else
                for (const auto& access : own)
                    if (access.owner)
                        release_owner(access.owner);
        }
    }

    // Lets the streams of two devices wait for each other, as torch does around a copy between them.
    static void order(c10::DeviceIndex first, c10::DeviceIndex second)
    {
        races->order(current_stream(first), first, current_stream(second), second);
        races->order(current_stream(second), second, current_stream(first), first);
    }

    static void raise()
    {
        char text[RACE_TEXT_SIZE];
        if (races->take(text, sizeof text))
            throw std::runtime_error(text);
    }

private:
    const char* name_;
    int place_, outer_;
    bool is_transfer_ = false;
    std::vector<race_access> accesses_;
    std::vector<c10::DeviceIndex> devices_;
};

} // namespace engine
