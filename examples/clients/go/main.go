// Quire over gRPC. Usage: client {stream,chat,cancel,resume,errors} TARGET...
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"math/rand"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	quire "quire/v1"
)

// Both kinds of streams.
type deltas interface {
	next() ([]*quire.ChoiceDelta, error)
}

type started struct {
	quire.InferenceService_StreamGenerateClient
}

type resumed struct {
	quire.InferenceService_ResumeGenerateClient
}

func (s started) next() ([]*quire.ChoiceDelta, error) {
	message, err := s.Recv()
	return message.GetDeltas(), err
}

func (s resumed) next() ([]*quire.ChoiceDelta, error) {
	message, err := s.Recv()
	return message.GetDeltas(), err
}

func stream(ctx context.Context, gateway quire.InferenceServiceClient) error {
	call, err := gateway.StreamGenerate(ctx, &quire.StreamGenerateRequest{
		Prompt:         &quire.StreamGenerateRequest_Text{Text: "Return the number of"},
		SamplingParams: &quire.SamplingParams{MaxTokens: u32(32), Seed: u64(1)},
	})
	if err != nil {
		return err
	}
	for {
		message, err := call.Recv()
		if err == io.EOF {
			fmt.Println()
			return nil
		}
		if err != nil {
			return err
		}
		for _, delta := range message.GetDeltas() {
			fmt.Print(delta.GetText())
		}
	}
}

func chat(ctx context.Context, gateway quire.InferenceServiceClient) error {
	messages := []*quire.Message{{Role: "user", Content: "What does this function return?"}}
	response, err := gateway.Generate(ctx, &quire.GenerateRequest{
		Prompt: &quire.GenerateRequest_Conversation{
			Conversation: &quire.Conversation{Messages: messages},
		},
		SamplingParams: &quire.SamplingParams{MaxTokens: u32(32), Seed: u64(1)},
	})
	if err == nil {
		fmt.Println(response.GetChoices()[0].GetText())
	}
	return err
}

// Cancels by the id, which works from anywhere. Cancelling the context ends the request, too.
func cancel(ctx context.Context, gateway quire.InferenceServiceClient) error {
	id := newID()
	call, err := gateway.StreamGenerate(ctx, &quire.StreamGenerateRequest{
		RequestId:      &id,
		Prompt:         &quire.StreamGenerateRequest_Text{Text: "Return a list of"},
		SamplingParams: &quire.SamplingParams{MaxTokens: u32(400), IgnoreEos: yes()},
	})
	if err != nil {
		return err
	}
	if _, err = call.Recv(); err != nil {
		return err
	}
	if _, err = gateway.CancelGenerate(ctx, &quire.CancelGenerateRequest{RequestId: id}); err != nil {
		return err
	}
	for err == nil {
		_, err = call.Recv()
	}
	if status.Code(err) == codes.Canceled {
		fmt.Println("CANCELLED")
		return nil
	}
	return err
}

// Continues after the tokens received so far, at the next gateway, until the end.
func resume(ctx context.Context, gateways []quire.InferenceServiceClient) error {
	id := newID()
	request := &quire.StreamGenerateRequest{
		RequestId:      &id,
		Prompt:         &quire.StreamGenerateRequest_Text{Text: "Open the file"},
		SamplingParams: &quire.SamplingParams{MaxTokens: u32(200), Seed: u64(1), IgnoreEos: yes()},
		ResumeWindowS:  u32(30),
	}
	start := func(gateway quire.InferenceServiceClient) (deltas, error) {
		call, err := gateway.StreamGenerate(ctx, request)
		return started{call}, err
	}
	nextToken, hasEnd := uint32(0), false
	again := func(gateway quire.InferenceServiceClient) (deltas, error) {
		call, err := gateway.ResumeGenerate(ctx, &quire.ResumeGenerateRequest{
			RequestId: id, NextTokenIndices: []uint32{nextToken},
		})
		return resumed{call}, err
	}
	open, wait := start, 50*time.Millisecond
	for at := 0; ; at++ {
		call, err := open(gateways[at%len(gateways)])
		for err == nil {
			var received []*quire.ChoiceDelta
			received, err = call.next()
			for _, delta := range received {
				if !hasEnd {
					fmt.Print(delta.GetText())
				}
				if len(delta.GetTokenIds()) > 0 {
					nextToken = delta.GetFirstTokenIndex() + uint32(len(delta.GetTokenIds()))
				}
				hasEnd = hasEnd || delta.GetFinishReason() != quire.FinishReason_FINISH_REASON_UNSPECIFIED
			}
		}
		switch {
		case err == io.EOF:
			fmt.Println()
			return nil
		case nextToken == 0 && errorInfo(err).GetReason() == "UNKNOWN_REQUEST":
			open = start
		case isResumable(err):
			open = again
		default:
			return err
		}
		time.Sleep(wait)
		if wait *= 2; wait > 2*time.Second {
			wait = 2 * time.Second
		}
	}
}

func isResumable(err error) bool {
	info := errorInfo(err)
	switch status.Code(err) {
	case codes.Unavailable:
		return true
	case codes.Canceled:
		return info == nil || info.GetMetadata()["resumable"] == "true"
	}
	return info.GetMetadata()["resumable"] == "true"
}

// Returns nil, whose methods return zero values, if the error has none.
func errorInfo(err error) *errdetails.ErrorInfo {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

func showError(ctx context.Context, gateway quire.InferenceServiceClient) error {
	topP := float32(2)
	_, err := gateway.Generate(ctx, &quire.GenerateRequest{
		Prompt:         &quire.GenerateRequest_Text{Text: "a"},
		SamplingParams: &quire.SamplingParams{TopP: &topP},
	})
	failed := status.Convert(err)
	fmt.Printf("%s: %s\n", failed.Code(), failed.Message())
	for _, detail := range failed.Details() {
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			fmt.Println("BadRequest:", detail.GetFieldViolations()[0].GetField())
		case *errdetails.ErrorInfo:
			fmt.Println("ErrorInfo:", detail.GetReason())
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			fmt.Printf("RetryInfo: %d ms\n", delay.GetSeconds()*1000+int64(delay.GetNanos())/1e6)
		}
	}
	return nil
}

func newID() string        { return fmt.Sprintf("example-%d", rand.Int63()) }
func u32(n uint32) *uint32 { return &n }
func u64(n uint64) *uint64 { return &n }
func yes() *bool           { value := true; return &value }

func main() {
	rand.Seed(time.Now().UnixNano())
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	// Responses with log-probabilities may be larger than gRPC's default limit, 4 MiB.
	limit := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(32 << 20))
	var gateways []quire.InferenceServiceClient
	for _, target := range os.Args[2:] {
		// Debian 12 has gRPC 1.33; since 1.63 this is grpc.NewClient with insecure.NewCredentials().
		channel, err := grpc.Dial(target, grpc.WithInsecure(), limit)
		if err != nil {
			log.Fatal(err)
		}
		defer channel.Close()
		gateways = append(gateways, quire.NewInferenceServiceClient(channel))
	}
	steps := map[string]func(context.Context, quire.InferenceServiceClient) error{
		"stream": stream, "chat": chat, "cancel": cancel, "errors": showError,
	}
	var err error
	if step := os.Args[1]; step == "resume" {
		err = resume(ctx, gateways)
	} else {
		err = steps[step](ctx, gateways[0])
	}
	if err != nil {
		log.Fatal(err)
	}
}
