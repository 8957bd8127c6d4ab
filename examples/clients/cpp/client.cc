// Quire over gRPC. Usage: client {stream,chat,cancel,resume,errors} TARGET...
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "quire/v1/inference.grpc.pb.h"

using namespace quire::v1;
using Gateway = InferenceService::Stub;
using std::chrono::milliseconds;

std::unique_ptr<grpc::ClientContext> call_context() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  return context;
}

std::string new_id() { return "example-" + std::to_string(std::random_device()()); }

// Unpacks the error's detail of the message's type; returns whether there is one.
template <typename Detail>
bool unpack(const grpc::Status& error, Detail* detail) {
  google::rpc::Status status;
  status.ParseFromString(error.error_details());
  return std::any_of(status.details().begin(), status.details().end(),
                     [&](const auto& packed) { return packed.UnpackTo(detail); });
}

grpc::Status stream(Gateway& gateway) {
  StreamGenerateRequest request;
  request.set_text("Return the number of");
  request.mutable_sampling_params()->set_max_tokens(32);
  request.mutable_sampling_params()->set_seed(1);
  auto context = call_context();
  auto call = gateway.StreamGenerate(context.get(), request);
  StreamGenerateResponse message;
  while (call->Read(&message)) {
    for (const auto& delta : message.deltas()) std::cout << delta.text() << std::flush;
  }
  std::cout << "\n";
  return call->Finish();
}

grpc::Status chat(Gateway& gateway) {
  GenerateRequest request;
  auto* message = request.mutable_conversation()->add_messages();
  message->set_role("user");
  message->set_content("What does this function return?");
  request.mutable_sampling_params()->set_max_tokens(32);
  request.mutable_sampling_params()->set_seed(1);
  GenerateResponse response;
  auto status = gateway.Generate(call_context().get(), request, &response);
  if (status.ok()) std::cout << response.choices(0).text() << "\n";
  return status;
}

// Cancels by the id, which works from anywhere. context->TryCancel() ends the request, too.
grpc::Status cancel(Gateway& gateway) {
  StreamGenerateRequest request;
  request.set_request_id(new_id());
  request.set_text("Return a list of");
  request.mutable_sampling_params()->set_max_tokens(400);
  request.mutable_sampling_params()->set_ignore_eos(true);
  auto context = call_context();
  auto call = gateway.StreamGenerate(context.get(), request);
  StreamGenerateResponse message;
  call->Read(&message);
  CancelGenerateRequest cancellation;
  cancellation.set_request_id(request.request_id());
  CancelGenerateResponse cancelled;
  auto status = gateway.CancelGenerate(call_context().get(), cancellation, &cancelled);
  if (!status.ok()) return status;
  while (call->Read(&message)) {
  }
  status = call->Finish();
  if (status.error_code() != grpc::StatusCode::CANCELLED) return status;
  std::cout << "CANCELLED\n";
  return grpc::Status::OK;
}

bool is_resumable(const grpc::Status& error) {
  google::rpc::ErrorInfo info;
  if (error.error_code() == grpc::StatusCode::UNAVAILABLE) return true;
  if (!unpack(error, &info)) return error.error_code() == grpc::StatusCode::CANCELLED;
  auto resumable = info.metadata().find("resumable");
  return resumable != info.metadata().end() && resumable->second == "true";
}

// Continues after the tokens received so far, at the next gateway, until the end.
class ResumableStream {
 public:
  grpc::Status run(const std::vector<std::unique_ptr<Gateway>>& gateways) {
    request_.set_request_id(new_id());
    request_.set_text("Open the file");
    request_.mutable_sampling_params()->set_max_tokens(200);
    request_.mutable_sampling_params()->set_seed(1);
    request_.mutable_sampling_params()->set_ignore_eos(true);
    request_.set_resume_window_s(30);
    auto wait = milliseconds(50);
    bool was_sent = false;
    for (size_t at = 0;; ++at, wait = std::min(2 * wait, milliseconds(2000))) {
      Gateway& gateway = *gateways[at % gateways.size()];
      grpc::Status status = was_sent ? resume(gateway) : start(gateway);
      google::rpc::ErrorInfo info;
      if (status.ok()) {
        std::cout << "\n";
        return status;
      }
      bool is_lost =
          next_token_ == 0 && unpack(status, &info) && info.reason() == "UNKNOWN_REQUEST";
      if (!is_lost && !is_resumable(status)) return status;
      was_sent = !is_lost;
      std::this_thread::sleep_for(wait);
    }
  }

 private:
  grpc::Status start(Gateway& gateway) {
    auto context = call_context();
    return read<StreamGenerateResponse>(gateway.StreamGenerate(context.get(), request_));
  }

  grpc::Status resume(Gateway& gateway) {
    ResumeGenerateRequest again;
    again.set_request_id(request_.request_id());
    again.add_next_token_indices(next_token_);
    auto context = call_context();
    return read<ResumeGenerateResponse>(gateway.ResumeGenerate(context.get(), again));
  }

  template <typename Response>
  grpc::Status read(std::unique_ptr<grpc::ClientReader<Response>> call) {
    Response message;
    while (call->Read(&message)) {
      for (const ChoiceDelta& delta : message.deltas()) {
        if (!has_end_) std::cout << delta.text() << std::flush;
        if (delta.token_ids_size()) {
          next_token_ = delta.first_token_index() + delta.token_ids_size();
        }
        has_end_ = has_end_ || delta.finish_reason() != FINISH_REASON_UNSPECIFIED;
      }
    }
    return call->Finish();
  }

  StreamGenerateRequest request_;
  uint32_t next_token_ = 0;
  bool has_end_ = false;
};

grpc::Status errors(Gateway& gateway) {
  static const std::map<grpc::StatusCode, std::string> names = {
      {grpc::StatusCode::INVALID_ARGUMENT, "INVALID_ARGUMENT"},
      {grpc::StatusCode::UNAVAILABLE, "UNAVAILABLE"}};
  GenerateRequest request;
  request.set_text("a");
  request.mutable_sampling_params()->set_top_p(2);
  GenerateResponse response;
  auto status = gateway.Generate(call_context().get(), request, &response);
  std::cout << names.at(status.error_code()) << ": " << status.error_message() << "\n";
  google::rpc::BadRequest bad;
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  if (unpack(status, &bad)) std::cout << "BadRequest: " << bad.field_violations(0).field() << "\n";
  if (unpack(status, &info)) std::cout << "ErrorInfo: " << info.reason() << "\n";
  if (unpack(status, &retry)) {
    const auto& delay = retry.retry_delay();
    std::cout << "RetryInfo: " << delay.seconds() * 1000 + delay.nanos() / 1000000 << " ms\n";
  }
  return grpc::Status::OK;
}

int main(int argc, char** argv) {
  // Responses with log-probabilities may be larger than gRPC's default limit, 4 MiB.
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(32 << 20);
  std::vector<std::unique_ptr<Gateway>> gateways;
  for (int at = 2; at < argc; ++at) {
    gateways.push_back(InferenceService::NewStub(
        grpc::CreateCustomChannel(argv[at], grpc::InsecureChannelCredentials(), arguments)));
  }
  const std::map<std::string, std::function<grpc::Status(Gateway&)>> steps = {
      {"stream", stream}, {"chat", chat}, {"cancel", cancel}, {"errors", errors}};
  const std::string step = argv[1];
  auto status = step == "resume" ? ResumableStream().run(gateways) : steps.at(step)(*gateways[0]);
  if (!status.ok()) std::cerr << status.error_message() << "\n";
  return status.ok() ? 0 : 1;
}
