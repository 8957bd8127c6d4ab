# Quire over gRPC. Usage: ruby -I GENERATED client.rb {stream,chat,cancel,resume,errors} TARGET...
require 'securerandom'

require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'grpc'
require 'quire/v1/inference_services_pb'

include Quire::V1

def stream(gateway)
  request = StreamGenerateRequest.new(
    text: 'Return the number of',
    sampling_params: SamplingParams.new(max_tokens: 32, seed: 1)
  )
  gateway.stream_generate(request, deadline: Time.now + 60).each do |message|
    message.deltas.each { |delta| print delta.text }
  end
  puts
end

def chat(gateway)
  message = Message.new(role: 'user', content: 'What does this function return?')
  request = GenerateRequest.new(
    conversation: Conversation.new(messages: [message]),
    sampling_params: SamplingParams.new(max_tokens: 32, seed: 1)
  )
  puts gateway.generate(request, deadline: Time.now + 60).choices.first.text
end

# Cancels by the id, which works from anywhere. Cancelling the call ends the request, too.
def cancel(gateway)
  id = SecureRandom.uuid
  request = StreamGenerateRequest.new(
    request_id: id,
    text: 'Return a list of',
    sampling_params: SamplingParams.new(max_tokens: 400, ignore_eos: true)
  )
  gateway.stream_generate(request, deadline: Time.now + 60).each_with_index do |_, index|
    gateway.cancel_generate(CancelGenerateRequest.new(request_id: id)) if index.zero?
  end
rescue GRPC::Cancelled
  puts 'CANCELLED'
end

# Continues after the tokens received so far, at the next gateway, until the end.
def resume(gateways)
  request = StreamGenerateRequest.new(
    request_id: SecureRandom.uuid,
    text: 'Open the file',
    sampling_params: SamplingParams.new(max_tokens: 200, seed: 1, ignore_eos: true),
    resume_window_s: 30
  )
  gateway = gateways.cycle
  next_token = failures = 0
  has_end = false
  start = -> { gateway.next.stream_generate(request, deadline: Time.now + 60) }
  open = start
  begin
    open.call.each do |message|
      message.deltas.each do |delta|
        print delta.text unless has_end
        next_token = delta.first_token_index + delta.token_ids.size unless delta.token_ids.empty?
        has_end ||= delta.finish_reason != :FINISH_REASON_UNSPECIFIED
      end
    end
    puts
  rescue GRPC::BadStatus => error
    if next_token.zero? && details(error)['ErrorInfo']&.reason == 'UNKNOWN_REQUEST'
      open = start
    elsif resumable?(error)
      again = ResumeGenerateRequest.new(
        request_id: request.request_id, next_token_indices: [next_token]
      )
      open = -> { gateway.next.resume_generate(again, deadline: Time.now + 60) }
    else
      raise
    end
    sleep [0.05 * 2**failures, 2].min
    failures += 1
    retry
  end
end

def resumable?(error)
  return true if error.code == GRPC::Core::StatusCodes::UNAVAILABLE

  info = details(error)['ErrorInfo']
  info ? info.metadata['resumable'] == 'true' : error.code == GRPC::Core::StatusCodes::CANCELLED
end

def errors(gateway)
  request = GenerateRequest.new(text: 'a', sampling_params: SamplingParams.new(top_p: 2))
  gateway.generate(request, deadline: Time.now + 60)
rescue GRPC::BadStatus => error
  codes = GRPC::Core::StatusCodes
  puts "#{codes.constants.find { |name| codes.const_get(name) == error.code }}: #{error.details}"
  found = details(error)
  puts "BadRequest: #{found['BadRequest'].field_violations.first.field}" if found['BadRequest']
  puts "ErrorInfo: #{found['ErrorInfo'].reason}" if found['ErrorInfo']
  if found['RetryInfo']
    delay = found['RetryInfo'].retry_delay
    puts "RetryInfo: #{delay.seconds * 1000 + delay.nanos / 1_000_000} ms"
  end
end

# The details of an error, by the names of their types.
def details(error)
  status = error.to_rpc_status
  return {} unless status

  status.details.to_h do |packed|
    name = packed.type_name.split('.').last
    [name, packed.unpack(Google::Rpc.const_get(name))]
  end
end

step, *targets = ARGV
$stdout.sync = true
# Responses with log-probabilities may be larger than gRPC's default limit, 4 MiB.
channel_args = { 'grpc.max_receive_message_length' => 32 * 2**20 }
gateways = targets.map do |target|
  InferenceService::Stub.new(target, :this_channel_is_insecure, channel_args: channel_args)
end
step == 'resume' ? resume(gateways) : send(step, gateways.first)
