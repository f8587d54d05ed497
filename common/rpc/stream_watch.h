// gRPC's synchronous streams can wait for their peer without end. This thread cancels those that have waited too long for one
// message, to come or to go, so that a silent or stopped client never keeps a server thread. Thread-safe.
#pragma once

#include <set>
#include <thread>

#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "grpcpp/grpcpp.h"

namespace tandem {

class StreamWatch {
 public:
  StreamWatch() : thread_([this] { Loop(); }) {}
  ~StreamWatch() {
    {
      MutexLock lock(&mutex_);
      is_stopping_ = true;
      changed_.Signal();
    }
    thread_.join();
  }

  // While it lives the stream may wait until `deadline`, then it is cancelled.
  class Wait {
   public:
    Wait(StreamWatch* watch, grpc::ServerContext* context, MonotonicTime deadline)
        : watch_(watch), context_(context), deadline_(deadline) {
      MutexLock lock(&watch_->mutex_);
      watch_->waits_.insert(this);
    }
    ~Wait() {
      MutexLock lock(&watch_->mutex_);
      watch_->waits_.erase(this);
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    friend class StreamWatch;
    StreamWatch* const watch_;
    grpc::ServerContext* const context_;
    const MonotonicTime deadline_;
  };

 private:
  void Loop() {
    MutexLock lock(&mutex_);
    while (!is_stopping_) {
      for (Wait* wait : waits_) {
        if (MonotonicTime::Now() > wait->deadline_) wait->context_->TryCancel();
      }
      changed_.WaitFor(&mutex_, absl::Milliseconds(100));
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::set<Wait*> waits_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace tandem
