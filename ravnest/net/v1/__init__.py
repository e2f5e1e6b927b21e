"""Protobuf modules generated from proto/ravnest/v1 at build: frame_pb2 and control_pb2."""
