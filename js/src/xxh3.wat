;; The loop of XXH3-64 over inputs of more than 240 bytes; `checksum.js` does the rest. `npm run wasm` compiles it
;; into `xxh3_wasm.js`.
;;
;; Memory: the secret (192 bytes), eight accumulators (64 bytes), and from 1024 on 16 KiB of the input.
(module
  (memory (export "memory") 1)
  (data (i32.const 0)
    "\b8\fe\6c\39\23\a4\4b\be\7c\01\81\2c\f7\21\ad\1c\de\d4\6d\e9\83\90\97\db\72\40\a4\a4\b7\b3\67\1f"
    "\cb\79\e6\4e\cc\c0\e5\78\82\5a\d0\7d\cc\ff\72\21\b8\08\46\74\f7\43\24\8e\e0\35\90\e6\81\3a\26\4c"
    "\3c\28\52\bb\91\c3\00\cb\88\d0\65\8b\1b\53\2e\a3\71\64\48\97\a2\0d\f9\4e\38\19\ef\46\a9\de\ac\d8"
    "\a8\fa\76\3f\e3\9c\34\3f\f9\dc\bb\c7\c7\0b\4f\1d\8a\51\e0\4b\cd\b4\59\31\c8\9f\7e\c9\d9\78\73\64"
    "\ea\c5\ac\83\34\d3\eb\c3\c5\81\a0\ff\fa\13\63\eb\17\0d\dd\51\b7\f0\da\49\d3\16\55\26\29\d4\68\9e"
    "\2b\16\be\58\7d\47\a1\fc\8f\f8\b8\d1\7a\d0\31\ce\45\cb\3a\8f\95\16\04\28\af\d7\fb\ca\bb\4b\40\7e")

  ;; Accumulates stripes of 64 bytes. The secret moves by 8 bytes with each.
  (func $stripes (export "stripes") (param $at i32) (param $count i32) (param $secret i32)
    (local $a v128) (local $b v128) (local $c v128) (local $d v128) (local $data v128) (local $key v128)
    (local.set $a (v128.load (i32.const 192)))
    (local.set $b (v128.load (i32.const 208)))
    (local.set $c (v128.load (i32.const 224)))
    (local.set $d (v128.load (i32.const 240)))
    (block $done
      (loop $next
        (br_if $done (i32.eqz (local.get $count)))
        (local.set $data (v128.load (local.get $at)))
        (local.set $key (v128.xor (local.get $data) (v128.load (local.get $secret))))
        (local.set $a
          (i64x2.add
            (i64x2.add
              (local.get $a)
              (i8x16.shuffle 8 9 10 11 12 13 14 15 0 1 2 3 4 5 6 7 (local.get $data) (local.get $data)))
            (i64x2.extmul_low_i32x4_u
              (i8x16.shuffle 0 1 2 3 8 9 10 11 0 1 2 3 8 9 10 11 (local.get $key) (local.get $key))
              (i8x16.shuffle 4 5 6 7 12 13 14 15 4 5 6 7 12 13 14 15 (local.get $key) (local.get $key)))))
        (local.set $data (v128.load offset=16 (local.get $at)))
        (local.set $key (v128.xor (local.get $data) (v128.load offset=16 (local.get $secret))))
        (local.set $b
          (i64x2.add
            (i64x2.add
              (local.get $b)
              (i8x16.shuffle 8 9 10 11 12 13 14 15 0 1 2 3 4 5 6 7 (local.get $data) (local.get $data)))
            (i64x2.extmul_low_i32x4_u
              (i8x16.shuffle 0 1 2 3 8 9 10 11 0 1 2 3 8 9 10 11 (local.get $key) (local.get $key))
              (i8x16.shuffle 4 5 6 7 12 13 14 15 4 5 6 7 12 13 14 15 (local.get $key) (local.get $key)))))
        (local.set $data (v128.load offset=32 (local.get $at)))
        (local.set $key (v128.xor (local.get $data) (v128.load offset=32 (local.get $secret))))
        (local.set $c
          (i64x2.add
            (i64x2.add
              (local.get $c)
              (i8x16.shuffle 8 9 10 11 12 13 14 15 0 1 2 3 4 5 6 7 (local.get $data) (local.get $data)))
            (i64x2.extmul_low_i32x4_u
              (i8x16.shuffle 0 1 2 3 8 9 10 11 0 1 2 3 8 9 10 11 (local.get $key) (local.get $key))
              (i8x16.shuffle 4 5 6 7 12 13 14 15 4 5 6 7 12 13 14 15 (local.get $key) (local.get $key)))))
        (local.set $data (v128.load offset=48 (local.get $at)))
        (local.set $key (v128.xor (local.get $data) (v128.load offset=48 (local.get $secret))))
        (local.set $d
          (i64x2.add
            (i64x2.add
              (local.get $d)
              (i8x16.shuffle 8 9 10 11 12 13 14 15 0 1 2 3 4 5 6 7 (local.get $data) (local.get $data)))
            (i64x2.extmul_low_i32x4_u
              (i8x16.shuffle 0 1 2 3 8 9 10 11 0 1 2 3 8 9 10 11 (local.get $key) (local.get $key))
              (i8x16.shuffle 4 5 6 7 12 13 14 15 4 5 6 7 12 13 14 15 (local.get $key) (local.get $key)))))
        (local.set $at (i32.add (local.get $at) (i32.const 64)))
        (local.set $secret (i32.add (local.get $secret) (i32.const 8)))
        (local.set $count (i32.sub (local.get $count) (i32.const 1)))
        (br $next)))
    (v128.store (i32.const 192) (local.get $a))
    (v128.store (i32.const 208) (local.get $b))
    (v128.store (i32.const 224) (local.get $c))
    (v128.store (i32.const 240) (local.get $d)))

  ;; Accumulates blocks of 16 stripes, and scrambles after each.
  (func (export "blocks") (param $at i32) (param $count i32)
    (local $lane i32) (local $sum v128)
    (block $done
      (loop $next
        (br_if $done (i32.eqz (local.get $count)))
        (call $stripes (local.get $at) (i32.const 16) (i32.const 0))
        (local.set $lane (i32.const 0))
        (loop $scramble
          (local.set $sum (v128.load offset=192 (local.get $lane)))
          (v128.store offset=192
            (local.get $lane)
            (i64x2.mul
              (v128.xor
                (v128.xor (local.get $sum) (i64x2.shr_u (local.get $sum) (i32.const 47)))
                (v128.load offset=128 (local.get $lane)))
              (v128.const i64x2 0x9E3779B1 0x9E3779B1)))
          (local.set $lane (i32.add (local.get $lane) (i32.const 16)))
          (br_if $scramble (i32.lt_u (local.get $lane) (i32.const 64))))
        (local.set $at (i32.add (local.get $at) (i32.const 1024)))
        (local.set $count (i32.sub (local.get $count) (i32.const 1)))
        (br $next))))
)
