"""Code shared by client and server: conversion of trtc.v1 messages and error statuses."""
